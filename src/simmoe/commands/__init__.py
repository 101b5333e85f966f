"""The subcommands of ``simmoe``, one module each; they join the rooms and may import all of them."""

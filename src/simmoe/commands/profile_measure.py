"""``simmoe profile measure``: everything that is measured of a model and layout, on the GPU of this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from simmoe.commands.asked_layout import require_budgets, require_cards
from simmoe.errors import MissingDependency
from simmoe.writing import check_place


@dataclass(frozen=True)
class MeasureOptions:
    """What is asked for on the command line."""

    model: str
    """A shipped model's name, or the path of a Hugging Face config.json."""
    split: int
    """Sub-experts every routed expert is split into; 1 measures the model as published."""
    raw: Path
    """Sample file. Recordings, the MoE layer's times, and the model's config are kept beside it."""
    graphs: str = "banks"
    """'banks': CUDA graphs keyed by k, up to the largest step; 'default': vLLM's own sizes, at the largest k alone;
    'none': eager."""
    sync: bool = False
    """Synchronous scheduling."""
    budgets: tuple[int, ...] = ()
    """Measured, ascending; the largest k is added. Empty: up to ten."""
    max_tokens: int = 8192
    """Tokens of the largest step."""
    tensor_parallel: int = 1
    expert_parallel: bool = False
    passes: int = 3
    recording_s: float = 48.0
    """Seconds of Poisson arrivals in all recordings together."""
    pin: bool = False
    """Give the threads that schedule and launch physical cores of their own."""
    memory_utilization: float = 0.9
    """Of the card's memory, what weights, activations and KV cache may take: vLLM's gpu_memory_utilization."""
    time_limit_s: float = float("inf")
    """Seconds for all of it, the engine's start included."""

    def command(self, model_name: str) -> str:
        """Return the command line, without paths."""
        words = [f"simmoe profile measure --model {model_name} --split {self.split} --graphs {self.graphs}"]
        words += ["--sync"] * self.sync
        if self.budgets:
            words.append(f"--budgets {','.join(map(str, self.budgets))}")
        words.append(f"--max-tokens {self.max_tokens}")
        if self.tensor_parallel > 1:
            words.append(f"--tensor-parallel {self.tensor_parallel}{' --expert-parallel' * self.expert_parallel}")
        if self.recording_s != MeasureOptions.recording_s:
            words.append(f"--recording-seconds {self.recording_s:g}")
        if self.passes != MeasureOptions.passes:
            words.append(f"--passes {self.passes}")
        words += ["--pin"] * self.pin
        if self.memory_utilization != MeasureOptions.memory_utilization:
            words.append(f"--gpu-memory-utilization {self.memory_utilization:g}")
        return " ".join(words)


def measure_samples(options: MeasureOptions) -> list[str]:
    """Measure into a sample file and the files beside it; what is there is not measured again.

    Returns:
        What is still to be measured when the time limit was reached, in words.
    Raises:
        MissingDependency: vLLM, or a GPU, is not here.
        UsageError: no such model, experts that cannot be split so, or a budget the model does not have.
        DataError: a configuration that is not supported.
        LiveError: the card is busy, the k that ran is not the k named, or a stage failed.
    """
    start_s = time.monotonic()
    if find_spec("vllm") is None:
        raise MissingDependency("measuring a profile needs vLLM and an NVIDIA GPU: pip install 'simmoe[live]'")
    from rich.console import Console
    from rich.progress import Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from simmoe.live.measure import Measuring, card, check_begun, measure
    from simmoe.live.measure.layout import layout_of
    from simmoe.live.measure.loads import Loads
    from simmoe.live.measure.models import read_split, write_model

    short, model = read_split(options.model, options.split)
    k_max = int(model.config["num_experts_per_tok"])
    require_budgets(options.budgets, k_max)
    require_cards(options.tensor_parallel, options.expert_parallel)
    card.refuse_busy(options.tensor_parallel)
    folder = options.raw.with_suffix(".model")
    setup, plan = layout_of(
        folder,
        k_max,
        graphs=options.graphs,
        async_scheduling=not options.sync,
        budgets=options.budgets,
        max_tokens=options.max_tokens,
        tensor_parallel=options.tensor_parallel,
        expert_parallel=options.expert_parallel,
        passes=options.passes,
        pin=options.pin,
        memory_utilization=options.memory_utilization,
    )
    run = Measuring(
        model=model,
        setup=setup,
        plan=plan,
        out=options.raw,
        loads=None if options.sync else Loads.lasting(options.recording_s),
        layer=bool(setup.captured_sizes) and not options.sync,
        time_limit_s=options.time_limit_s - (time.monotonic() - start_s),
        command=options.command(short),
    )
    check_begun(run)
    check_place(run.recording_path, "recordings")
    check_place(run.layer_path, "the layer's times")
    check_place(folder / "config.json", "the model")
    write_model(model.config, folder, setup.max_model_len)
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)
            if not console.is_terminal:
                seconds = time.monotonic() - start_s
                console.print(
                    f"[{seconds:6.1f} s] {done}/{total} {what}", highlight=False, markup=False, soft_wrap=True
                )

        return measure(run, show)

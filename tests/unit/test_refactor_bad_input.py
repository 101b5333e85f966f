"""What cannot be refactored is refused in one line, and nothing half-written is left."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch", reason="refactoring needs torch; run make test-live")
pytest.importorskip("transformers", reason="refactoring needs transformers; run make test-live")
pytest.importorskip("numba", reason="annealing on a CPU needs numba; run make test-live")

import safetensors.torch  # noqa: E402

from simmoe import cli  # noqa: E402
from simmoe.errors import OutputError, RefactorError, SimmoeError  # noqa: E402
from simmoe.live.refactor import checkpoint, engine  # noqa: E402
from simmoe.live.refactor.anneal import Schedule  # noqa: E402
from simmoe.live.refactor.engine import RefactorConfig, refactor  # noqa: E402
from tests.support.small_moe import calibration_text, write_model  # noqa: E402

QUICK = RefactorConfig(schedule=Schedule(iterations=20))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", "olmoe", shard_size="100KB")


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return calibration_text(tmp_path / "calibration.txt", 1500)


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def last_shard(model: Path) -> Path:
    return sorted(model.glob("*.safetensors"))[-1]


def drop_an_expert(model: Path) -> None:
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].pop("model.layers.1.mlp.experts.3.up_proj.weight")
    path.write_text(json.dumps(index))


def spoil_a_weight(model: Path) -> None:
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    path = checkpoint.Checkpoint(model).shard_of[name]
    tensors = safetensors.torch.load_file(path)
    tensors[name][0, 0] = float("nan")
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def drop_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "unsupported family": (lambda m: edit_config(m, model_type="mixtral"), "'mixtral' cannot be refactored"),
    "refactored already": (
        lambda m: edit_config(m, simmoe_refactor={"splits": 4, "gate": "linear"}), "already refactored (splits 4",
    ),
    "refactored by hand": (lambda m: edit_config(m, simmoe_refactor="yes"), "already refactored; start from"),
    "family of another type": (lambda m: edit_config(m, model_type=["olmoe"]), "['olmoe'] cannot be refactored"),
    "quantised": (lambda m: edit_config(m, quantization_config={"quant_method": "fp8"}), "quantization_config is set"),
    "more selected than there are": (lambda m: edit_config(m, num_experts_per_tok=9), "9 exceeds num_experts 8"),
    "true is no number": (lambda m: edit_config(m, num_experts_per_tok=True), "num_experts_per_tok is True"),
    "another width": (lambda m: edit_config(m, intermediate_size=64), "config.json asks for 64 rows"),
    "fewer experts": (lambda m: edit_config(m, num_experts=4), "config.json asks for 4 rows"),
    "another head count": (lambda m: edit_config(m, num_attention_heads=3), "transformers cannot load it"),
    "index without files": (
        lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}'), "names no file",
    ),
    "a weight that is no number": (spoil_a_weight, "layer 0 expert 3 has activations that are not finite"),
    "no count": (lambda m: edit_config(m, num_experts=None), "num_experts is None"),
    "missing shard": (lambda m: last_shard(m).unlink(), "is missing; download the checkpoint again"),
    "cut shard": (lambda m: last_shard(m).write_bytes(last_shard(m).read_bytes()[:100]), "not a readable safetensors"),
    "missing tensor": (drop_an_expert, "experts.3.up_proj.weight' is missing"),
    "no config": (lambda m: (m / "config.json").unlink(), "config.json: not found"),
    "broken config": (lambda m: (m / "config.json").write_text("{"), "not readable JSON"),
    "no tokenizer": (drop_tokenizer, "no usable tokeniser"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_checkpoints(case: str, model: Path, text: Path, tmp_path: Path) -> None:
    spoil, message = SPOILED[case]
    spoil(model)
    with pytest.raises(RefactorError) as caught:
        refactor(model, text, tmp_path / "out", QUICK, device="cpu")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["calibration.txt", "model"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--splits", "3"], 7, "intermediate_size 32 is not a multiple of 3"),
        (["--splits", "1"], 7, "2 parts or more"),
        (["--k-drop", "4"], 7, "must be between 1 and 3"),
        (["--gate-neurons", "9"], 7, "between 1 and the sub-expert width 8"),
        (["--cooling", "1.5"], 2, "--cooling 1.5"),
        (["--gate", "cubic"], 2, "cubic"),
        (["--t0", "nan"], 2, "--t0 nan"),
        (["--t0", "inf"], 2, "--t0 inf"),
        (["--seed", str(2**32)], 2, "--seed"),
        (["--device", "abacus"], 6, "--device abacus"),
    ],
)
def test_options(
    arguments: list[str], code: int, message: str, model: Path, text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    command = ["refactor", str(model), "--calibration", str(text), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert cli.run([*command, "--iterations", "10", *arguments]) == code
    said = capsys.readouterr().err
    assert message in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("config", [replace(QUICK, k_drop=4), replace(QUICK, gate_neurons=9)])
def test_options_are_refused_before_the_model_is_loaded(
    config: RefactorConfig, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "load_model", None)
    with pytest.raises(RefactorError, match="must be between 1 and"):
        refactor(model, text, tmp_path / "out", config, device="cpu")


def test_an_output_that_cannot_be_is_refused_before_the_model_is_loaded(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "load_model", None)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for out, message in ((text / "out", "no directory that can be written to"), (tmp_path / "dangling", "exists")):
        with pytest.raises(OutputError, match=message):
            refactor(model, text, out, QUICK, device="cpu")
    with pytest.raises(OutputError, match="no directory that can be written to"):
        refactor(model, text, Path("/proc/new/out"), QUICK, device="cpu")  # not even by root


def test_code_in_the_source_is_not_run(tmp_path: Path, text: Path) -> None:
    """The published DeepSeek-V2 brings modelling code of an older transformers, whose experts cannot be hooked."""
    model = write_model(tmp_path / "model", "deepseek_v2")
    stem = {"AutoConfig": "configuration_deepseek.DeepseekV2Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}
    edit_config(model, auto_map=stem)
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (model / name).write_text("raise ImportError('needs transformers 4.39')")
    refactor(model, text, tmp_path / "out", QUICK, device="cpu")
    assert "simmoe_cg_deepseek_v2" in (tmp_path / "out" / "config.json").read_text()


def test_shards_are_as_readable_as_other_files(tmp_path: Path) -> None:
    with checkpoint.new_checkpoint(tmp_path / "out", shard_bytes=1000) as writer:
        for n in range(3):
            writer.add(f"t{n}", torch.zeros(200))
        writer.write_json("config.json", {})
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1


def test_too_little_calibration_text(model: Path, tmp_path: Path) -> None:
    short = calibration_text(tmp_path / "short.txt", 20)
    with pytest.raises(RefactorError, match="20 tokens are less than one window of 128"):
        refactor(model, short, tmp_path / "out", QUICK, device="cpu")


def test_an_existing_directory_is_left_alone(model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    with pytest.raises(OutputError, match="exists already"):
        refactor(model, text, tmp_path / "out", QUICK, device="cpu")
    assert (tmp_path / "out" / "precious").read_text() == "kept"


@pytest.mark.parametrize("shards_before", [0, 2])
def test_a_full_disk_half_way_leaves_nothing(
    shards_before: int, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills at a shard; what was written goes, and the name the user asked for never appears."""
    written: list[Path] = []
    save = safetensors.torch.save_file

    def save_until_full(tensors: dict[str, Tensor], path: Path, **more: Any) -> None:
        if len(written) == shards_before:
            path.write_bytes(b"half a sh")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path, **more)
        written.append(path)

    monkeypatch.setattr(checkpoint, "save_file", save_until_full)
    source = checkpoint.Checkpoint(pristine)
    with (
        pytest.raises(OutputError, match="No space left on device"),
        checkpoint.new_checkpoint(tmp_path / "out", shard_bytes=50_000) as writer,
    ):
        for name, tensor in source.tensors():
            writer.add(name, tensor)
    assert len(written) == shards_before
    assert list(tmp_path.iterdir()) == []


def test_any_failure_half_way_leaves_nothing(pristine: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), checkpoint.new_checkpoint(tmp_path / "out") as writer:
        writer.add("a", torch.zeros(3))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


_STOPS_IN_ITS_SECOND_SHARD = """
import sys, time
from pathlib import Path
import torch
from simmoe.live.refactor import checkpoint

save, shards = checkpoint.save_file, []

def save_half(tensors, path, **more):
    save(tensors, path, **more)
    shards.append(path)
    if len(shards) == 2:
        path.write_bytes(path.read_bytes()[:100])
        print("half way", flush=True)
        sys.stdin.read()

checkpoint.save_file = save_half
with checkpoint.new_checkpoint(Path(sys.argv[1]), shard_bytes=1000) as writer:
    for n in range(5):
        writer.add(f"t{n}", torch.zeros(200))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_run_leaves_nothing_that_looks_whole_and_the_next_removes_it(
    how: signal.Signals, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", _STOPS_IN_ITS_SECOND_SHARD, str(out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "half way\n"
        (partial,) = tmp_path.iterdir()
        with checkpoint.new_checkpoint(tmp_path / "other") as writer:
            writer.add("a", torch.zeros(3))
        with pytest.raises(KeyboardInterrupt), checkpoint.new_checkpoint(out):
            raise KeyboardInterrupt
        assert partial.exists()  # its run was alive
        run.send_signal(how)
        run.wait()
    assert not out.exists()
    assert partial.exists() == (how != signal.SIGINT)
    with checkpoint.new_checkpoint(out) as writer:
        writer.add("a", torch.zeros(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_leftovers_of_other_machines_and_names_stay(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above the kernel's largest process id
    there = [f".out.partial-elsewhere-{dead}", f".out2.partial-{socket.gethostname()}-{dead}", ".out.partial-mine"]
    for name in there:
        (tmp_path / name).mkdir()
    with checkpoint.new_checkpoint(tmp_path / "out") as writer:
        writer.add("a", torch.zeros(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*there, "out"])


def test_shards_and_index_round_trip(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.full((100,), float(n)) for n in range(7)}
    with checkpoint.new_checkpoint(tmp_path / "out", shard_bytes=1000) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.write_json("config.json", {})
    read = checkpoint.Checkpoint(tmp_path / "out")
    assert len(set(read.shard_of.values())) == 4
    assert {name: tensor.tolist() for name, tensor in read.tensors()} == {n: t.tolist() for n, t in tensors.items()}


def test_every_refusal_is_of_the_error_tree() -> None:
    assert issubclass(RefactorError, SimmoeError) and issubclass(OutputError, SimmoeError)

"""Files with random edits: each is served or refused in one line, quickly, in bounded memory.

`FUZZ=2000 python -m pytest tests/whole/test_damaged_models.py` tries more of them; `FUZZ_SEED` chooses others.
"""

import os
import random
import resource
import subprocess
import sys
import time
import traceback

import pytest
from gguf_bytes import unpack
from gguf_files import write_gguf
from mutations import edit_checkpoint, edit_gguf, fresh_copy, harmless_checkpoint_edit, harmless_gguf_edit
from served import outcome

COUNT = int(os.environ.get("FUZZ", "50"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
MOST_SECONDS = 5.0
MOST_GROWTH = 1 << 30  # bytes
KINDS = ("llama", "qwen2", "gemma3", "phi3")


@pytest.fixture(scope="module")
def folders(tiny):
    """Checkpoints in two shards each, with every file that a published one has."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    made = []
    for kind in KINDS:
        folder = tiny(kind)
        model = AutoModelForCausalLM.from_pretrained(folder)
        sharded = folder.with_name(f"{kind}-sharded")
        model.save_pretrained(sharded, max_shard_size=model.num_parameters() * 4 * 2 // 3)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (sharded / name).write_bytes((folder / name).read_bytes())
        GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, eos_token_id=[2]).save_pretrained(sharded)
        assert (sharded / "model.safetensors.index.json").is_file()
        made.append(sharded)
    return made


@pytest.fixture(scope="module")
def ggufs(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return [unpack(write_gguf(tiny(kind), folder / f"{kind}.gguf").read_bytes()) for kind in KINDS]


class Findings:
    """What went wrong, with the seed that makes it again."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.served = self.refused = 0
        self.slowest = 0.0
        self.began = time.perf_counter()
        self.memory = _peak()

    def examine(self, seed: object, said: str, model) -> None:
        began = time.perf_counter()
        try:
            result = outcome(model)
        except Exception:
            self.faults.append(f"{seed}: {said}\n{traceback.format_exc()[-1500:]}")
            return
        finally:
            seconds = time.perf_counter() - began
            self.slowest = max(self.slowest, seconds)
            if seconds > MOST_SECONDS:
                self.faults.append(f"{seed}: {said}: {seconds:.1f} s")
        self.served += result.answer is not None
        self.refused += result.answer is None
        if os.environ.get("FUZZ_LOG"):
            with open(os.environ["FUZZ_LOG"], "a", encoding="utf-8", errors="replace") as log:
                log.write(f"{seed}\t{said!r}\t{'served' if result.answer else 'REFUSED'}\t{result.text!r}\n")

    def check(self) -> None:
        growth = _peak() - self.memory
        seconds = time.perf_counter() - self.began
        print(
            f"\n{self.served} served, {self.refused} refused, {len(self.faults)} faults; slowest {self.slowest:.1f} s, "
            f"{seconds:.0f} s in all, peak memory grew by {growth >> 20} MiB"
        )
        assert not self.faults, "\n\n".join([f"{len(self.faults)} faults", *self.faults[:20]])
        assert self.served
        assert self.refused
        assert growth < MOST_GROWTH


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_checkpoint_folders_with_random_edits_are_served_or_refused_in_one_line(folders, tmp_path):
    findings = Findings()
    for index in range(COUNT):
        rng = random.Random(f"folder {SEED} {index}")
        folder = fresh_copy(rng.choice(folders), tmp_path / "model")
        findings.examine(index, edit_checkpoint(rng, folder), folder)
    findings.check()


def test_gguf_files_with_random_edits_are_served_or_refused_in_one_line(ggufs, tmp_path):
    findings = Findings()
    for index in range(COUNT):
        rng = random.Random(f"gguf {SEED} {index}")
        said, content = edit_gguf(rng, rng.choice(ggufs))
        (tmp_path / "model.gguf").write_bytes(content)
        findings.examine(index, said, tmp_path / "model.gguf")
    findings.check()


def test_edits_of_a_folder_that_change_nothing_give_the_same_numbers(folders, tmp_path):
    for index in range(max(8, COUNT // 20)):
        rng = random.Random(f"harmless folder {SEED} {index}")
        source = folders[index % len(folders)]
        folder = fresh_copy(source, tmp_path / "model")
        said = harmless_checkpoint_edit(rng, folder)
        (ids, numbers), expected = outcome(folder).answer, outcome(source).answer
        assert ids == expected[0], f"{index}: {said}"
        # Padding moves the weights to addresses of another alignment, where products round differently.
        near = pytest.approx(expected[1], abs=2e-6) if said == "padding" else expected[1]
        assert numbers == near, f"{index}: {said}"


def test_edits_of_a_gguf_file_that_change_nothing_give_the_same_numbers(ggufs, tmp_path):
    plain, edited = tmp_path / "plain.gguf", tmp_path / "edited.gguf"
    for index in range(max(8, COUNT // 20)):
        rng = random.Random(f"harmless gguf {SEED} {index}")
        gguf = ggufs[index % len(ggufs)]
        plain.write_bytes(gguf.pack())
        said, content = harmless_gguf_edit(rng, gguf)
        edited.write_bytes(content)
        expected = outcome(plain)
        assert expected.answer is not None, expected.text
        assert outcome(edited).answer == expected.answer, f"{index}: {said}"


@pytest.mark.slow
def test_the_command_ends_with_an_answer_or_with_one_line_about_the_model(folders, ggufs, tmp_path):
    for index in range(max(6, min(20, COUNT // 10))):
        rng = random.Random(f"command {SEED} {index}")
        if index % 2:
            model = tmp_path / "model.gguf"
            said, content = edit_gguf(rng, rng.choice(ggufs))
            model.write_bytes(content)
        else:
            model = fresh_copy(rng.choice(folders), tmp_path / "model")
            said = edit_checkpoint(rng, model)
        command = [sys.executable, "-P", "-m", "lean", "run", str(model), "ab", "--max-tokens", "2", "--device", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
        assert done.returncode in (0, 2), f"{index}: {said}: {done.returncode} {done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr, f"{index}: {said}: {done.stderr[-2000:]}"
        if done.returncode == 2:
            assert done.stdout == ""
            assert done.stderr.splitlines()[-1].startswith("lean: "), f"{index}: {said}: {done.stderr[-2000:]}"

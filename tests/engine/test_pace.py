"""Fewer threads where others use the CPUs, and all of them again when the machine is quiet."""

import pytest

from lean.engine.pace import Pace


class Machine:
    """Two CPUs, and how long steps take on them by the number of threads; a clock that they move."""

    def __init__(self, steps: dict[int, float], own_share: float = 1.0, most: int = 2) -> None:
        self.steps, self.own_share = steps, own_share
        self.now = self.own = 100.0
        self.used: list[int] = []
        self.threads = most
        self.pace = Pace(most, self._use, lambda: self.now, lambda: self.own)

    def _use(self, threads: int) -> None:
        self.threads = threads
        self.used.append(threads)

    def run(self, seconds: float, rows: int = 1) -> dict[int, float]:
        """Run decode steps for so long. Returns the seconds by number of threads."""
        end, spent = self.now + seconds, dict.fromkeys(self.steps, 0.0)
        while self.now < end:
            threads, step = self.threads, self.steps[self.threads]
            started = self.pace.start()
            self.now += step
            self.own += step * self.own_share
            spent[threads] += step
            self.pace.end(started, rows)
        return spent


QUIET, BUSY = {1: 0.03, 2: 0.017}, {1: 0.05, 2: 0.15}


def test_nothing_is_tried_on_a_quiet_machine():
    machine = Machine(QUIET)
    machine.run(60)
    assert machine.used == []


def test_an_engine_that_does_not_get_its_cpu_takes_fewer_threads_and_says_it_once(caplog):
    machine = Machine(BUSY, own_share=0.5)
    machine.run(3)
    assert machine.threads == 1
    spent = machine.run(60)
    assert spent[1] > 0.8 * 60
    assert [record.getMessage() for record in caplog.records] == [
        "other programs use the CPUs: steps are computed with 1 of 2 threads while that is faster"
    ]


def test_a_note_that_is_not_logged_is_kept(caplog):
    machine = Machine(BUSY, own_share=0.5)
    machine.pace.aloud = False
    machine.run(3)
    assert (
        machine.pace.note == "other programs use the CPUs: steps are computed with 1 of 2 threads while that is faster"
    )
    assert not caplog.records


def test_it_takes_all_of_them_again_when_the_others_are_gone():
    machine = Machine(BUSY, own_share=0.5)
    machine.run(300)  # trials that were lost make the next one wait
    assert machine.threads == 1
    machine.steps, machine.own_share = QUIET, 1.0
    machine.run(90)
    assert machine.threads == 2
    assert machine.run(60)[1] == 0


def test_all_threads_stay_where_fewer_are_not_faster_and_trials_become_rare():
    machine = Machine({1: 0.05, 2: 0.05}, own_share=0.5)
    spent = machine.run(400)
    assert machine.threads == 2
    assert spent[1] < 0.02 * 400


def test_of_many_threads_as_many_are_left_out_as_it_pays():
    steps = {8: 0.4, 7: 0.2, 6: 0.1, 5: 0.11, 4: 0.13}
    machine = Machine(steps, own_share=0.4, most=8)
    machine.run(300)
    assert machine.threads == 6 or machine.run(5)[6] > 3


@pytest.mark.parametrize("rows", [2, 8])
def test_steps_of_another_size_end_a_trial_without_a_judgement(rows):
    machine = Machine(BUSY, own_share=0.5)
    while machine.threads == 2:
        machine.run(0.01)
    assert machine.threads == 1
    machine.run(0.01, rows)
    assert machine.threads == 2


def test_a_number_of_threads_that_was_asked_for_stays(tiny, monkeypatch):
    import torch

    from lean import LLM, EngineConfig, threads

    def has_pace(config: EngineConfig) -> bool:
        return LLM(str(tiny("llama")), config).engine.pace is not None

    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "_fitted", 2)
    monkeypatch.setattr(threads, "fit_threads", lambda: "one for each core that the process may use")
    assert has_pace(EngineConfig())
    assert not has_pace(EngineConfig(threads=2))
    monkeypatch.setattr(threads, "_fitted", 4)  # the program has set 2
    assert not has_pace(EngineConfig())
    monkeypatch.setattr(threads, "_fitted", 2)
    monkeypatch.setattr(threads, "fit_threads", lambda: "OMP_NUM_THREADS=2 in the environment")
    assert not has_pace(EngineConfig())


def test_all_threads_are_taken_again_at_the_end_and_a_program_that_sets_others_keeps_them():
    machine = Machine(BUSY, own_share=0.5)
    machine.run(3)
    assert machine.threads == 1
    machine.pace.close()
    assert machine.threads == 2
    other = Machine(BUSY, own_share=0.5)
    other.pace._are_still = lambda number: other.threads == number
    other.run(3)
    other.threads = 2  # by the program
    other.used.clear()
    other.run(300)
    other.pace.close()
    assert other.used == []

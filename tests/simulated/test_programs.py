from __future__ import annotations

from dataclasses import replace

import pytest

from kvcanary.engines.simulated import STYLES, SimulatedEngine, Wrong
from kvcanary.errors import ConfigError
from kvcanary.events import ViolationDetected
from kvcanary.faults.agreement import disagreements, search, shrink
from kvcanary.faults.matrix import matrix
from kvcanary.faults.programs import Call, Outcome, Program, random_program, run
from kvcanary.faults.simulated_faults import SIMULATED, SimulatedInjector

CHUNK = 50
LENGTH = 14


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        count = metafunc.config.getoption("programs", 1200)
        metafunc.parametrize("first_seed", range(0, count, CHUNK))


def test_oracle_and_canary_agree_on_random_programs_with_at_most_one_fault(first_seed: int) -> None:
    found = search(range(first_seed, first_seed + CHUNK), ["", *SIMULATED], length=LENGTH)
    assert not found.problems, "\n\n".join(found.problems)
    assert found.harmed
    assert found.reads > CHUNK


@pytest.mark.parametrize("seed", [1191, 13163])
def test_oracle_and_canary_agree_where_they_once_did_not(seed: int) -> None:
    """A page handed to its only holder; and a lost write whose page was given up before anybody looked again."""
    found = search([seed], ["", *SIMULATED], length=LENGTH)
    assert sum(found.harmed.values()) == 0
    assert not found.problems


def test_oracle_and_canary_agree_on_long_programs_without_a_fault() -> None:
    found = search(range(10_000, 10_040), [""], length=60)
    assert not found.problems, "\n\n".join(found.problems)
    assert not found.harmed


def test_a_wrong_that_nobody_reports_is_a_disagreement() -> None:
    outcome = Outcome([Wrong(3, "read", "r1", "full", 4, 16, 0)], [], None, 5, 9)
    assert disagreements(outcome) == [f"missed: {outcome.truth[0]}"]


def violation(forward: int, request: str = "r1", page: int = 4) -> ViolationDetected:
    return ViolationDetected(forward=forward, kind="DIGEST", role="check", group="full", page=page, request=request)


def test_a_report_of_the_same_page_in_time_agrees_and_one_that_comes_later_does_not() -> None:
    wrong = Wrong(3, "read", "r1", "full", 4, 16, 0)
    assert disagreements(Outcome([wrong], [violation(3, "r9")], None, 5, 9)) == []
    assert disagreements(Outcome([wrong], [violation(4, "r9")], None, 5, 9)) == [f"missed: {wrong}"]


def test_an_alarm_before_anything_is_wrong_or_about_somebody_else_is_false() -> None:
    wrong = Wrong(3, "read", "r1", "full", 4, 16, 0)
    early = Outcome([wrong], [violation(2), violation(3)], None, 5, 9)
    assert [line[:11] for line in disagreements(early)] == ["false alarm"]
    stranger = Outcome([wrong], [violation(3), violation(3, "r2", page=7)], None, 5, 9)
    assert disagreements(stranger) == ["false alarm: DIGEST: full page 7 of r2 in forward 3"]


def test_a_program_is_cut_down_to_what_is_needed() -> None:
    program = Program(style=STYLES["paged"], seed=1, calls=tuple(Call("step", n) for n in range(20)), fault="x", at=15)
    short = shrink(program, lambda one: any(call.number == 7 for call in one.calls))
    assert short.calls == (Call("step", 7),)
    assert short.at <= 1


def test_a_canary_that_misses_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary.kernels.ref_check.check", lambda *_: None)
    monkeypatch.setattr("kvcanary.faults.agreement.shrink", lambda program, _: program)
    found = search(range(40), ["swapped-pages"], length=LENGTH)
    assert found.problems
    assert "missed" in found.problems[0]


def test_a_canary_that_cries_wolf_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary.lifecycle.digest_tokens", lambda *_: 12345)
    monkeypatch.setattr("kvcanary.faults.agreement.shrink", lambda program, _: program)
    found = search(range(30), [""], length=LENGTH)
    assert found.problems
    assert all("false alarm" in problem for problem in found.problems)
    assert any("REQUEST_DIGEST" in problem for problem in found.problems)


@pytest.mark.parametrize("fault", SIMULATED)
def test_each_fault_is_named_by_the_right_check_in_time_and_its_twin_is_silent(fault: str) -> None:
    fitting = [name for name, style in STYLES.items() if SIMULATED[fault].fits(style)]
    style = fitting[sorted(SIMULATED).index(fault) % len(fitting)]
    (cell,) = matrix(faults=[fault], styles=[style])
    assert cell.holds, cell
    assert cell.clean
    assert cell.detected_by in SIMULATED[fault].fault.expects


def test_a_cell_in_which_the_fault_does_no_harm_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary.faults.matrix.TRIES", 2)
    operation = replace(SIMULATED["wild-entry"], arm=lambda _: None)
    monkeypatch.setitem(SIMULATED, "wild-entry", operation)
    (cell,) = matrix(faults=["wild-entry"], styles=["paged"])
    assert not cell.holds
    assert "did no harm in 2 programs" in cell.problem


def test_a_cell_whose_fault_is_seen_by_nobody_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary.kernels.ref_check.check", lambda *_: None)
    (cell,) = matrix(faults=["wild-entry"], styles=["paged"])
    assert "not seen by SLOT_RANGE; found was nothing" in cell.problem


def test_faults_and_styles_that_do_not_exist_or_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="no fault 'wild'"):
        matrix(faults=["wild"])
    with pytest.raises(ConfigError, match="no style 'flat'"):
        matrix(styles=["flat"])
    with pytest.raises(ConfigError, match="none of these faults"):
        matrix(faults=["lost-translation"], styles=["paged"])


def test_an_injector_plants_one_fault_that_fits() -> None:
    injector = SimulatedInjector(SimulatedEngine("paged"))
    with pytest.raises(ConfigError, match="no fault 'flipped'"):
        injector.plant("flipped")
    with pytest.raises(ConfigError, match="cannot happen in style 'paged'"):
        injector.plant("lost-translation")
    injector.plant("flipped-bit")
    with pytest.raises(ConfigError, match="one injector plants one fault"):
        injector.plant("swapped-pages")


def test_a_program_is_the_same_every_time() -> None:
    program = random_program(11, faults=["early-free"])
    one, two = run(program), run(program)
    assert one.truth == two.truth
    assert [(f.kind, f.forward, f.page) for f in one.findings] == [(f.kind, f.forward, f.page) for f in two.findings]


def written(style: str, seed: int, fault: str, at: int, calls: str) -> Program:
    pairs = (call.partition(":") for call in calls.split())
    made = tuple(Call(what, int(number)) for what, _, number in pairs)
    return Program(style=STYLES[style], seed=seed, calls=made, fault=fault, at=at)


def test_what_is_wrong_with_a_value_is_its_writers_wherever_it_moves_and_whoever_writes_the_same() -> None:
    calls = "submit:340264 again:345237 step:804838 again:723966 defragment:561876 weights:535942 step:254406"
    outcome = run(written("null-block", 5915, "not-a-number", 2, calls))
    assert {wrong.author for wrong in outcome.truth if wrong.due == "now"} == {"r1"}
    assert len({wrong.page for wrong in outcome.truth}) == 2
    assert disagreements(outcome) == []


def test_a_broken_link_is_a_repeat_for_whoever_comes_the_same_way_later() -> None:
    calls = (
        "submit:1012005 submit:502016 step:922008 submit:8504 step:494202 submit:280960 abort:767862 step:659268 "
        "offload:945024 submit:914423 step:985606 step:136302 again:680920 again:865851"
    )
    outcome = run(written("paged", 10, "colliding-keys", 3, calls))
    assert {wrong.request for wrong in outcome.truth} == {"r5", "r6"}
    assert {finding.request for finding in outcome.findings} == {"r5"}
    assert disagreements(outcome) == []
    first = [wrong for wrong in outcome.truth if wrong.request == "r6"]
    assert disagreements(replace(outcome, truth=first)) != []


def test_odd_programs_have_styles_that_are_none_of_the_named_ones_and_poison() -> None:
    programs = [random_program(seed, odd=True) for seed in range(60)]
    drawn = [program.style for program in programs if program.style not in STYLES.values()]
    assert 15 < len(drawn) < 45
    assert {style.page_size for style in drawn} == {1, 2, 3, 4, 8, 16}
    assert any(style.window < style.page_size for style in drawn if style.sliding)
    assert {program.poison for program in programs} == {"off", "sample", "full"}
    assert str(programs[0]) != str(replace(programs[0], poison="full", at=3, fault="early-free"))


def test_a_token_that_was_swapped_before_an_offload_is_nobodys_miss_until_its_pages_are_read() -> None:
    calls = "submit:971334 submit:683175 step:0 step:0 offload:542948"
    program = written("null-block", 101966, "swapped-tokens", 2, calls)
    assert disagreements(run(program)) == []
    read = replace(program, calls=(*program.calls, *[Call("step", 0)] * 4))
    found = run(read)
    assert "REQUEST_DIGEST" in {finding.kind for finding in found.findings}
    assert disagreements(found) == []

from __future__ import annotations

import pytest

from kvcanary.faults.scenario import happenings as happen
from kvcanary.faults.scenario.happenings import Fault, Row, Term
from kvcanary.faults.scenario.notation import FORMS, parse_event
from kvcanary.faults.scenario.words import NotationError, places_in


def slots(first: int, last: int | None = None, space: str = "", at: int | None = None) -> Term:
    return Term(space, tuple(range(first, (first if last is None else last) + 1)), at)


def test_slots_are_single_numbers_and_ranges_in_any_space() -> None:
    assert places_in("4 0..2 h1 r4..r5 swa:2..3 r.head1:0") == (
        slots(4),
        slots(0, 2),
        slots(1, space="h"),
        slots(4, 5, space="r"),
        slots(2, 3, space="swa"),
        slots(0, space="r.head1"),
    )


def test_a_block_is_a_page_of_slots() -> None:
    assert places_in("block 2 swa:page 0..1") == (Term("", (2,), None, True), Term("swa", (0, 1), None, True))


def test_at_says_which_position_a_list_begins_at_and_a_dash_that_there_is_no_slot() -> None:
    assert places_in("- 3..4 at 31") == (Term("", (-1,)), slots(3, 4, at=31))


def test_a_launch_has_rows_with_what_they_read_and_write() -> None:
    event = parse_event("launch F1(A reads 0..7, writes 8; B) part draft unlinked")
    rows = (Row("A", (slots(0, 7),), (slots(8),)), Row("B"))
    assert event == happen.Launch(text=event.text, name="F1", rows=rows, part="draft", unlinked=True)


def test_what_a_forward_does_besides_its_tables_stands_behind_the_slots() -> None:
    event = parse_event("launch F1(A writes 8 at 9 tok guess lands 3 only k v)")
    assert isinstance(event, happen.Launch)
    assert event.rows[0].fault == Fault(9, "guess", lands=(slots(3),), only=("k", "v"))


def test_a_copy_says_for_whom_it_is_and_which_sources_it_takes() -> None:
    event = parse_event("copy_start X(0..3 -> h0..h3) for A ordered only k v")
    assert isinstance(event, happen.CopyStart)
    assert (event.request, event.ordered, event.only) == ("A", True, ("k", "v"))
    assert (event.sources, event.targets) == ((slots(0, 3),), (slots(0, 3, space="h"),))


def test_a_copy_may_come_from_nowhere_but_goes_somewhere() -> None:
    assert isinstance(parse_event("copy_start X(-> m3)"), happen.CopyStart)
    with pytest.raises(NotationError, match="expected slots, got none"):
        parse_event("copy_start X(3 -> )")


def test_every_form_is_read_as_it_is_documented() -> None:
    for word, form in FORMS.items():
        for example in form.example.split(" or "):
            event = parse_event(example)
            assert event.text == example
            assert example.startswith(word)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("aloc(A, 3)", "no event is called 'aloc' [(]did you mean 'alloc'"),
        ("???", "is no event; events look like alloc"),
        ("alloc(A)", r"expected 2 arguments, got 1; it is written alloc\(A, 3..5\)"),
        ("alloc(A, three)", "expected slots such as 4, 0..7"),
        ("alloc(A, 5..3)", "is no range"),
        ("alloc(A, h0..d3)", "begins in one space and ends in another"),
        ("alloc(A, swa:h3)", "names a group and a tier"),
        ("alloc A 3", "is no event|its arguments stand in brackets"),
        ("alloc(A, 3) twice", "nothing may follow the brackets, got 'twice'"),
        ("rewind(A, soon)", "expected a number of tokens, got 'soon'"),
        ("rewind(A, -1)", "expected a number of tokens from 0 to 65536, got -1"),
        ("admit(A, 99999999)", "expected a number of tokens from 0 to 65536, got 99999999"),
        ("launch F1(A writes 3; B; A)", "a request has one row in a forward, and A has two"),
        ("launch F1(A writes 3 land 4)", r"expected slots or one of .*, got 'land' [(]did you mean 'lands'"),
        ("launch F1(A reads 3 writes 4)", "a comma goes before 'writes'"),
        ("launch F1(A writes 3, B writes 4)", "got 'B'; a semicolon goes before the next row"),
        ("launch F1", "a forward has a name, and its rows in brackets"),
        ("launch (A writes 3)", "a forward has a name"),
        ("launch F1(A raeds 3)", "a row reads and writes, got 'raeds' [(]did you mean 'reads'"),
        ("launch F1(A writes 3 tok gues)", "expected tok NUMBER, tok guess, lost, nan"),
        ("launch F1(A writes 3 tok)", "expected tok NUMBER, tok guess, lost, nan"),
        ("launch F1(A writes 3) prat draft", "expected 'part NAME' or 'unlinked', got 'prat'"),
        ("launch F1(A reads 3 at)", "'at' follows places and is followed by a position"),
        ("run", "followed by the name of a forward"),
        ("copy_start X(3)", "expected 'from -> to'"),
        ("copy_start X(3 -> h0) orderd", "is none of .* [(]did you mean 'ordered'"),
        ("copy_land X(k 0)", "named by sources or by numbers, not by both"),
        ("copy_done", "followed by the name of a copy"),
        ("idle(3)", "it takes no arguments"),
    ],
)
def test_what_is_not_in_the_notation_is_refused_with_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(NotationError, match=says):
        parse_event(text)

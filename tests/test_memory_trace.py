"""Completing a trace of a few layers to the whole depth, on traces written by hand."""

import pytest

from preflight.memory.trace import CannotComplete, complete, replay, stacks_of

MIB = 1 << 20


def peak(events):
    live, high = {}, 0
    for event in events:
        if event[0] == "mark":
            continue
        if len(event) == 1:
            del live[event[0]]
        else:
            live[event[0]] = event[1]
            high = max(high, sum(live.values()))
    return high, live


def trace_of(layers: int):
    """A step by hand: each layer keeps 3, works with 5, passes 2 on; backward frees what it kept."""
    events, number, kept, handed = [["load", 0, -1]], 0, {}, {}
    for layer in range(layers):
        number += 1
        events.append([number, 7 * MIB, 0, layer])
    for layer in range(layers):
        events.append(["fwd", 0, layer])
        for size, name in ((3, kept), (5, None), (2, handed)):
            number += 1
            events.append([number, size * MIB, 1, layer])
            if name is None:
                work = number
            else:
                name[layer] = number
        events.append([work])
        if layer:
            events.append([handed[layer - 1]])
    events.append(["fwd", 0, -1])
    events.append([handed[layers - 1]])
    events.append(["bwd", 0, -1])
    for layer in reversed(range(layers)):
        events.append(["bwd", 0, layer])
        events.append([kept[layer]])
    return events


@pytest.mark.parametrize("depth", [5, 12, 80])
def test_four_layers_stand_for_any_number(depth):
    run = [0, 1, 2, depth - 1]
    stacks = stacks_of([{"kinds": [0] * depth, "run": run}])
    made, left = peak(complete(trace_of(4), stacks))
    # weights 7 each; at the end of the last layer's forward all keep 3, one works with 5, two hand over 2
    assert made == (7 * depth + 3 * depth + 5 + 2 + 2) * MIB
    assert sum(left.values()) == 7 * depth * MIB


def test_without_missing_layers_nothing_changes():
    stacks = stacks_of([{"kinds": [0] * 4, "run": [0, 1, 2, 3]}])
    made = [event for event in complete(trace_of(4), stacks) if event[0] != "mark"]
    assert len(made) == len([event for event in trace_of(4) if not isinstance(event[0], str)])


def test_a_kind_of_layer_that_never_ran_between_two_others_is_an_honest_failure():
    stacks = stacks_of([{"kinds": [0, 0, 0, 1, 1, 0], "run": [0, 1, 2, 5]}])
    with pytest.raises(CannotComplete):
        complete(trace_of(4), stacks)


def test_the_replay_knows_where_the_peak_was_and_what_was_there():
    stacks = stacks_of([{"kinds": [0] * 12, "run": [0, 1, 2, 11]}])
    made = replay(complete(trace_of(4), stacks), ["static|weight|[7]|u8", "activation|op|[n]|u8"])
    assert made.moment.startswith("forward")
    assert {row.kind for row in made.at_peak} == {"static", "activation"}
    assert made.tensors_bytes == (7 * 12 + 3 * 12 + 9) * MIB
    assert made.reserved_bytes >= made.allocated_bytes >= made.tensors_bytes


def test_a_card_that_is_too_small_ends_the_replay():
    stacks = stacks_of([{"kinds": [0] * 12, "run": [0, 1, 2, 11]}])
    made = replay(complete(trace_of(4), stacks), ["a|b|c|d", "a|b|c|d"], limit_bytes=60 * MIB)
    assert made.ran_out


def optimizer_trace(layers: int, at_once: bool):
    """A step over the layers' weights of 7 each: a loop whose variable of 2 is overwritten one turn later, or one
    operation that makes a temporary of 2 for all of them before the first ends."""
    events, number, temporaries = [["load", 0, -1]], 0, []
    for layer in range(layers):
        number += 1
        events.append([number, 7 * MIB, 0, layer])
    events.append(["opt", 0, -1])
    for layer in range(layers):
        number += 1
        events.append([number, 1 * MIB, 1, layer])  # a state
        number += 1
        events.append([number, 2 * MIB, 2, layer])
        temporaries.append(number)
        if layer and not at_once:
            events.insert(-1, [temporaries[layer - 1]])
    events += [[one] for one in (temporaries if at_once else temporaries[-1:])]
    events.append(["zero", 0, -1])
    return events


@pytest.mark.parametrize("depth", [5, 24])
@pytest.mark.parametrize("at_once", [False, True])
def test_temporaries_of_an_optimizer_are_held_as_long_as_its_loop_holds_them(depth, at_once):
    stacks = stacks_of([{"kinds": [0] * depth, "run": [0, 1, 2, depth - 1]}])
    made, left = peak(complete(optimizer_trace(4, at_once), stacks))
    assert sum(left.values()) == (7 + 1) * depth * MIB
    true = (7 + 1) * depth * MIB + (2 * depth if at_once else 2) * MIB
    # layers that are put in overlap with the one that ran before them: at most one temporary more, whatever the depth
    assert true <= made <= true + 2 * MIB

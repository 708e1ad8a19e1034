"""Counting memory of a block by hand and by the tape."""

from preflight.memory.tape import Storage, Tape

KIB = 1024


def test_a_chain_keeps_what_its_operations_need_for_backward():
    tape = Tape()
    x = tape.input("x", 1024, 1, 4)  # 4 KiB, from outside
    a = tape.op("a", [x], 1024, 2, 4, keeps=[x])  # 8 KiB, freed after b
    b = tape.op("b", [a], 1024, 4, 4, keeps_output=True)  # 16 KiB, kept
    c = tape.op("c", [b], 1024, 1, 4)  # 4 KiB, the result
    profile = tape.profile(c)
    assert profile.kept == 16 * KIB
    assert profile.keeps_input
    assert profile.forward_peak == 24 * KIB  # a and b together
    # backward of c: gradient of c 4 + b 16 + gradient of b 16 = 36; of b, which is freed only after its own
    # backward: b 16 + gradient of b 16 + gradient of a 8 = 40
    assert profile.backward_peak == 40 * KIB


def test_gradients_of_a_value_used_twice_are_added_in_place():
    tape = Tape()
    x = tape.input("x", 1024, 1, 4)
    a = tape.op("a", [x], 1024, 1, 4)
    b = tape.op("b", [x], 1024, 1, 4)
    c = tape.op("sum", [a, b], 1024, 1, 4, passes=True)
    # the sum hands its gradient on; b's backward makes 4 KiB for x while the shared gradient is still there, a's
    # makes 4 KiB more, added in place: 12 KiB at most
    assert tape.profile(c).backward_peak == 12 * KIB


def test_a_frozen_input_gets_no_gradient():
    tape = Tape()
    x = tape.input("x", 1024, 1, 4, grad=False)
    y = tape.op("y", [x], 1024, 1, 4, keeps=[Storage("s", 4096)])
    assert tape.profile(y).kept == 0


def test_trained_weights_leave_their_gradients_behind():
    tape = Tape()
    x = tape.input("x", 512, 1, 2)
    y = tape.op("linear", [x], 512, 1, 2, keeps=[x], weight_grad=1 << 20, trains=True)
    profile = tape.profile(y)
    assert profile.weight_grads == 1 << 20
    assert profile.backward_peak == (1 << 20) + 1024 + 1024

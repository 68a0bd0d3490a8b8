"""The names of a checkpoint's tensors.

    model/NAME             a parameter, in the dtype in which it is updated; a buffer of the model's state. A
                           tensor that is made of others is these, as NAME:PART: a quantised one its codes and
                           scales
    optimizer/NAME/KEY     what its optimizer keeps for it: exp_avg, momentum_buffer, step, ... (kept.py)
    made_by/NAME/CLASSES   which optimizer that was: a name without elements
    numbers/NAME/KEY       what schedulers change in a parameter group: lr, momentum, betas, ... (numbers.py)
    extra/NAME/STATE       what a module's get_extra_state returns
    left_out/, beside/     digests of a frozen base: base.py

Values that are no tensors become tensors with other keys: plain.py.
"""

MODEL, OPTIMIZER, MADE_BY, NUMBERS, EXTRA = "model/", "optimizer/", "made_by/", "numbers/", "extra/"
LEFT_OUT, BESIDE = "left_out/", "beside/"

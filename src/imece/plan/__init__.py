"""What fits, how fast, and why, before anything is rented: arithmetic on shapes, no torch and no ranks.

setup      what is asked about: a model, how ranks are arranged, how a step goes
hardware   what it runs on: of presets.toml or one's own file (presets), or this machine as measured (here)
models     the model's widths, by name or from code
memory     bytes of a rank
speed      time of a step
answer     which way is best, why, and how a person is told
accuracy   predictions beside published measurements
check      predictions beside a run of one's own
"""

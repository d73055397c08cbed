"""Other frameworks, measured on the same machine and with the same network as this one.

Each peer lives in a virtual environment of its own, so that its versions never meet ours.
`<peer>_peer.program` sets it up and says how it is run, `<peer>_train` is what runs inside, and
`benchmarks.training_run.watch` measures it from outside, as it does with our own training.
"""

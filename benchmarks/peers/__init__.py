"""Other frameworks, measured on the same machine and with the same network as this one.

Each peer lives in a virtual environment of its own, so that its versions never meet ours:
`sample_factory_peer` sets it up and measures it from outside, `sample_factory_train` is the
program that runs inside.
"""

"""Making records of a checkpoint: `mlxpool colibri convert`.

`source` says what the folder holds, `plan` what will be written and how large it is, `numbers` packs one
expert, `dense` everything else; `state` keeps what is done so that a killed conversion goes on, `work` puts
them in order, `verify` reads the result again.
"""

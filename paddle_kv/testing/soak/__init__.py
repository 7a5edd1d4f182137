"""Random traffic of a server with every block checked: what ``paddle-kv soak`` runs for minutes or hours.

``pattern`` says what a block must look like, ``compute`` (RAM) and ``gpu_compute`` write and compare it, ``contents``
knows what each block must hold, ``traffic`` makes the calls, ``meters`` watches memory and handles, ``run`` is the
whole.
"""

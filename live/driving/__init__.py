"""Replaying a workload against live engines, open loop, and recording what happened as the simulator records it.

``replay`` sends each request at its time, whatever became of the others; ``targets`` says to whom: engines of this
process (``engines``) or any OpenAI endpoint (``endpoint``). ``lag`` judges the sender itself, ``recording`` makes the
run record, and ``live_run`` puts it together.
"""

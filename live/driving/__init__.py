"""Replaying a workload against live engines, open loop, and recording what happened as the simulator records it.

``replay`` sends each request at its time, whatever became of the others, to a target: engines started from here
(``engines``), each behind a process of its own (``front_end``, talked to in ``conversation``), or any OpenAI endpoint
(``endpoint``). ``life`` is one request, ``lag`` judges the sender itself, ``recording`` makes the run record, and
``live_run`` puts it together.
"""

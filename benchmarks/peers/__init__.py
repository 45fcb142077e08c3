"""Pagoda beside the engines a user would pick instead, on the same weights and prompts, in one session.

    __main__     the command: workloads x engines x rounds
    workloads    what is asked, as rounds of Requests      sessions   recorded agent sessions as Requests
    engines      who is asked: packages, settings          venvs      one virtual environment per engine
    weights      one export of the weights for all         process    an engine in a process of its own
    adapters/    the other end of the pipe, one file per engine; runs in that engine's environment
    measure      results -> figures                        report     figures -> table, JSON; plots -> PNG

Engines stay loaded and take turns, round by round; whoever does not compute is stopped (SIGSTOP), so that no busy loop
of one costs another. `messages.py` and `adapters/` import nothing but the standard library and the engine itself.
"""

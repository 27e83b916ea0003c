"""Compare Paceline with other frameworks, and what it predicts with what is measured; `scripts/bench` runs it.

The modules in reading order, those with * need torch:

    command                                the command line
    step, strategies, pool                 steps, by processes that take turns
    contestants*, contestants_strategies*, raw_strategies*, bert_workload*     these processes
    startup, first_step*                   the time to the first step
    jobs, small_gpt*                       whole jobs
    horovod_names, horovod_job*            sums by Horovod's names
    restart, restart_job*                  after a rank was killed
    observe, observe_job*                  what it costs to keep times
    planner, planner_models*, planner_peaks*, planner_simulation*, planner_gpu*, llama_7b*     predicted memory
    published_table                        measurements that others published; benchmarks/published/ predicts them
"""

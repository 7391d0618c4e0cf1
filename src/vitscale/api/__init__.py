"""The functions that the package offers to Python code: one for each verb, which the command line calls too.

`vitscale.NAME` imports a function when it is first used, so that `import vitscale` stays fast. A function takes the
options of its verb under the same names (`--nodes-of` is `nodes_of`), and messages of errors name them as the command
line has them. It raises `errors.VitscaleError` where the command line exits with 2, prints nothing but progress, and
returns a `VerbResult`: shown in a notebook, and `to_json()` is what the verb prints with --json.

arguments   values that several functions take: paths, sizes, counts, where ranks are started
starting    init: a first study
planning    plan: what would run
running     run, train: do it
checking    check, check_training: look at the machines first
explaining  explain: why a command's training step takes as long as it does
reporting   report, report_like: tables, figures, a page (`load`, of frames and charts, is `pages.outputs.load`)
comparing   compare, compare_studies: results side by side
questions   the questions of predict and advise to results, and which options changed nothing
asked_models   the models that --model and --image-size ask for, found and counted
predicting  predict: what nobody has measured
advising    advise: what to rent
importing   import_results: others' logs as results
linting     lint: a DeepSpeed configuration
sharing     export, send, watch: results as a file or in a tracker, a look at a study that runs
laboratory  lab_status: hosts as namespaces on this machine
new_files   files that must not be there yet
"""

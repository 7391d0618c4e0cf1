"""Prediction: what nobody has measured, from what somebody has; and memory, by arithmetic alone.

Pure but for `evidence.evidence_of`: an analysis and checks in, predictions out. No charts, no torch.

evidence      what a results folder says for a prediction: series of measured points, and the network
network/      links, by name or as checked, and what collectives cost on them
step/         what an engine sends in a step, what of it computing hides, stragglers; a step as a sum of parts
parameters    what is estimated, and what is known of it beforehand
sampling, likelihood   draws of the parameters, and what the measurements say of them
fitting       each part fitted from what measured it; what nothing measured stays at its prior
layouts       where ranks lie, and what their batches are
shares        what a rank has of a model that several share
variants      a measured series with something changed
configurations   a configuration, and what is expected of many of them, as arrays
amdahl        Amdahl's law, and its share in predictions of others' programs
evaluating    the draws of a series, and what they make of configurations: one or thousands
variance      what each part leaves open of an answer
workloads     trials that train the same, and configurations answered from the nearest
labels        what an answer rests on, and what was assumed
questions     what is to differ from the measured series, as a user names it
model_requests   which models options ask for in place of the measured ones; `api.asked_models` finds them
predicting    a question answered: figures with their intervals
answering     all questions answered, the forecast of a report, and how well such answers did
finishing     hosts that fail, and checkpoints: from time of work to time to finish
gpu_types, instances   other types of GPU, and tables of what they rent for
start_up      what it takes until the first step
results       what a prediction is: figures with two intervals each, a label, and what was assumed
remarks       what a reader must know before the figures: unsteady runs, options that change nothing
memory/       how much memory a rank will take
"""

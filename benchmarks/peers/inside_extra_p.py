"""Run by Extra-P's own Python: rank counts and seconds in, seconds elsewhere out, as JSON."""

import json
import logging
import sys

from extrap.entities.callpath import Callpath
from extrap.entities.coordinate import Coordinate
from extrap.entities.experiment import Experiment
from extrap.entities.measurement import Measurement
from extrap.entities.metric import Metric
from extrap.entities.parameter import Parameter
from extrap.modelers.model_generator import ModelGenerator
from extrap.modelers.single_parameter.basic import SingleParameterModeler


def model(gpus, seconds):
    """Extra-P's function of the rank count; the runs of a count are its repetitions."""
    experiment, metric, path = Experiment(), Metric("time"), Callpath("epoch")
    experiment.add_parameter(Parameter("p"))
    experiment.add_metric(metric)
    experiment.add_callpath(path)
    for count in sorted(set(gpus)):
        coordinate = Coordinate(count)
        values = [value for at, value in zip(gpus, seconds, strict=True) if at == count]
        experiment.add_coordinate(coordinate)
        experiment.add_measurement(Measurement(coordinate, path, metric, values))
    modeler = SingleParameterModeler()
    modeler.allow_negative_exponents = True
    generator = ModelGenerator(experiment, modeler)
    generator.model_all()
    return next(iter(generator.models.values())).hypothesis.function


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asked = json.load(sys.stdin)
    functions = [model(asked["gpus"], seconds) for seconds in asked["seconds"]]
    json.dump([[float(function.evaluate(at)) for at in asked["where"]] for function in functions], sys.stdout)

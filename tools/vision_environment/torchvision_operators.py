"""Declares torchvision's compiled operators just before torchvision is imported, so that it can be.

Its wheel from the default package index is built for torch with CUDA. Beside the CPU build its library does not load,
and then `import torchvision` fails where it registers shapes and gradients for operators that do not exist. Only
detection models call these operators. Here they get their names and signatures, and no implementation: a call says so.

Python imports this module at start-up (a .pth file of the environment, see make_vision_environment.py). It imports
torch only once torchvision is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_POOLED = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_IMAGE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_CONVOLUTION = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask"
)
SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_POOLED}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_POOLED}, {_IMAGE}, int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align(Tensor input, Tensor rois, float input_scale, int input_zero_point, float rois_scale, "
    f"int rois_zero_point, {_POOLED}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {_POOLED}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_POOLED}, {_IMAGE}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_POOLED}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLED}, int sampling_ratio, "
    f"{_IMAGE}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {_POOLED}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLED}, {_IMAGE}) -> Tensor",
    f"deform_conv2d({_CONVOLUTION}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_CONVOLUTION}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""The operators that torchvision 0.28 has a shape or a gradient for, as its C++ sources declare them."""


class BeforeTorchvision(MetaPathFinder):
    """Declares the operators when torchvision is searched for, and leaves finding it to Python's own finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None: the module is found elsewhere."""
        del path, target
        is_wanted = fullname == "torchvision.extension"  # not "torchvision", which find_spec alone searches for too
        if is_wanted:
            sys.meta_path.remove(self)
            declare()
        return None


def declare() -> None:
    """Declare the operators that do not exist yet in torch's namespace `torchvision`."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    declared.append(library)
    for signature in SIGNATURES:
        library.define(signature)


declared: list[object] = []
"""Keeps the declarations: they end with their object."""

sys.meta_path.insert(0, BeforeTorchvision())

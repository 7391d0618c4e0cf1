"""Memory part by part, in forward's order, of the models that formulas count: ViT, Swin V2, and UperNet on either."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vitscale.engines.dtypes import weight_bytes
from vitscale.engines.parts import Part
from vitscale.prediction.memory.activations import activations, is_autocast
from vitscale.prediction.memory.in_stages import StageBytes
from vitscale.prediction.memory.pieces import Pieces
from vitscale.prediction.shares import WHOLE, Share
from vitscale.trial import model_counts
from vitscale.trial.model_cost import VitShape, decoder_shape, parameter_shapes, swin_shape, vit_shape
from vitscale.trial.model_counts import DecoderLayer, DecoderShape, SwinShape, SwinStage
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import TrainSpec, Trial


def pieces(spec: ModelSpec, train: TrainSpec, share: Share = WHOLE) -> Pieces:
    """The parts that a rank has of a resolved ViT or Swin.

    Sequence ranks each run the heads of segmentation on some of the images.
    """
    swin, images = swin_shape(spec), largest_micro_batch(train)
    labelled = math.ceil(images / share.parallel.sequence)
    narrow = _narrow(train)
    side = spec.image_size
    decoder = decoder_shape(spec)
    windows = () if swin is None else own_blocks(swin, share)
    buffers = sum(8 * s.window**4 + 2 * s.positions * weight_bytes(train) for s in windows)
    of_swin = _swin_in_stages if share.chunks else _swin
    body = _vit(spec, train, narrow, decoder, share) if swin is None else of_swin(spec, swin, train, narrow, share)
    cast = narrow == 2 and (share.first or not is_autocast(train))
    pixels = images * side**2 * (spec.channels * (4 + 2 * cast) + (0 if decoder is None else 8))
    if decoder is None or not share.last:
        return Pieces(tuple(body), pixels, 0, buffers)
    layers = model_counts.upernet_layers(decoder)
    if swin is not None and share.chunks:
        layers = list(_of_received(layers, decoder, swin, share))
    if swin is None and is_autocast(train):  # Swin's own maps are narrow
        layers = list(_casting_anew(layers, decoder))
    over_ranks = train.batch_norm == "synchronised" or share.parallel.sequence > 1
    head = [_layer(layer, labelled, narrow, train, over_ranks=over_ranks) for layer in layers]
    # The library's models resize their logits themselves, and the loop holds those; other models' are of a map's size.
    whole, on_map = (labelled * decoder.classes * size**2 for size in (side, decoder.sides[0]))
    held = on_map if swin is None or share.chunks else whole
    loss = _loss(whole, held, labelled * side**2, decoder, train)
    return Pieces((*body, *head, loss), pixels, held * narrow, buffers)


def own_blocks(swin: SwinShape, share: Share) -> list[SwinStage]:
    """The stage of Swin of each block that a rank has."""
    every = [stage for stage in model_counts.stages(swin, share.parallel.sequence) for _ in range(stage.depth)]
    return [every[block] for chunk in share.chunks for block in chunk] if share.chunks else every


def of_parts(trial: Trial, stage: Share, model: Pieces) -> StageBytes:
    """Bytes of a micro-batch in one of a pipeline's stages."""
    swin, vit, train = swin_shape(trial.model), vit_shape(trial.model), trial.train
    images = largest_micro_batch(train)
    sizes: list[list[int]] = []
    if swin is not None:
        sizes = [[n * images * _narrow(train) for n in of_unit] for of_unit in _going_on(trial.model, swin, stage)]
    elif vit is not None:
        tokens = math.ceil(vit.tokens / stage.parallel.sequence)
        sizes = [[images * tokens * vit.hidden * weight_bytes(train)]] * vit.layers
    (blocks,) = stage.chunks
    taken = [] if stage.first else sizes[blocks.start - 1]
    given = [] if stage.last else sizes[blocks.stop - 1]
    lasting = [part for part in model.parts if part.block < 1 or not train.activation_checkpointing]
    copies = sum(part.cast_bytes(linear=True) for part in lasting) if is_autocast(train) else 0
    kept, passed_on = sum(part.kept for part in model.parts) + copies + model.logits, sum(taken[1:]) if given else 0
    return StageBytes(kept, sum(taken), sum(given) - passed_on, passed_on)


def _going_on(spec: ModelSpec, swin: SwinShape, share: Share) -> list[list[int]]:
    """Elements per image of each tensor that is handed on behind each of a Swin's blocks."""
    maps = model_counts.swin_maps(swin, share.parallel.sequence, segments=spec.task == "segmentation")
    return [[math.prod(sizes) for sizes in of_unit] for of_unit in maps]


def _of_received(
    layers: list[DecoderLayer], decoder: DecoderShape, swin: SwinShape, share: Share
) -> Iterator[DecoderLayer]:
    """UperNet's layers in the last stage, without the maps that it received: those lie in the schedule's buffers."""
    (blocks,) = share.chunks
    received = len(model_counts.swin_maps(swin, segments=True)[blocks.start - 1]) - 1
    pooled = len(decoder.sides) - 1
    for number, layer in enumerate(layers):
        there = layer.taken if number < received else 0
        if number == pooled and not blocks:
            there = decoder.widths[-1] * decoder.sides[-1] ** 2
        yield layer._replace(kept=layer.kept - there)


def _narrow(train: TrainSpec) -> int:
    """Bytes of one element of activations."""
    return 2 if train.precision != "fp32" else 4


def _swin(spec: ModelSpec, shape: SwinShape, train: TrainSpec, narrow: int, share: Share) -> Iterator[Part]:
    """Patches and their norm; blocks, and the merging between stages; a norm and a classifier.

    Python holds the embedded patches until the last stage's forward is over, and a stage's output before merging until
    the next stage's forward is over. Maps that a decoder took wait with their gradients. A stage whose activations are
    computed again keeps only what it takes: checkpointing takes a stage for a block. On sequence ranks the first block
    keeps the embedded patches itself.
    """
    images, segments = largest_micro_batch(train), spec.task == "segmentation"
    stages = model_counts.stages(shape, share.parallel.sequence)
    embedded = images * narrow * shape.hidden_size * stages[0].tokens if share.parallel.sequence == 1 else 0
    blocks = model_counts.swin(shape)[1:]
    yield _embedding(shape, train, images, narrow, share)
    waiting = unmerged = 0
    for number, stage in enumerate(stages, 1):
        stream = images * narrow * stage.width * stage.tokens
        parts = [_block(stage, n, images, narrow, train, share, waiting) for n in range(stage.depth)]
        if stage is not stages[-1]:
            parts.append(_merge(stage, images, narrow, train, waiting))
        if train.activation_checkpointing:
            parts = [_computed_again(parts, stage.depth, stream, waiting)]
        for index, part in enumerate(parts, 1):
            block = 0 if not blocks[0].wrapped else index if len(stages) == 1 else number
            yield part._replace(forward=tuple(embedded + unmerged + own for own in part.forward), block=block)
        unmerged = stream
        waiting += stream if segments else 0
    if not segments:
        yield _head(stages[-1], spec.num_classes or 0, images, narrow, train, share)


def _swin_in_stages(spec: ModelSpec, shape: SwinShape, train: TrainSpec, narrow: int, share: Share) -> Iterator[Part]:
    """What one stage of a pipeline has; each block and each merging is wrapped by itself.

    A stage lets go of a module's input as soon as the module has given its output.
    """
    images, segments = largest_micro_batch(train), spec.task == "segmentation"
    stages = model_counts.stages(shape, share.parallel.sequence)
    every = [(stage, number) for stage in stages for number in range(stage.depth)]
    (blocks,) = share.chunks
    units: list[tuple[Part, int, int]] = []  # a part, its blocks (one or none), and the bytes that it takes
    # Gradients of received maps wait, whether from a head here or as they came. Maps that are made here stay.
    going_on = _going_on(spec, shape, share)
    received = [] if share.first else [images * narrow * size for size in going_on[blocks.start - 1]]
    waiting, made = sum(received[1:]), 0
    for stage, number in (every[block] for block in blocks):
        own = _block(stage, number, images, narrow, train, share, waiting)
        taken = images * narrow * stage.width * stage.tokens
        units.append((own._replace(forward=tuple(held - taken + made for held in own.forward)), 1, taken))
        if number == stage.depth - 1 and stage is not stages[-1]:
            units.append((_merge(stage, images, narrow, train, waiting), 0, taken))
            made += taken * segments
            waiting += taken * (segments and share.last)
    if not share.last:
        # What is passed on to the last unit lies in the schedule's buffer until its attention.
        last, of_block, taken = units[-1]
        handed_on = images * narrow * going_on[blocks.stop - 1][0]
        behind = len(last.backward) - 2 * of_block
        passed = (own - handed_on * (index < behind) for index, own in enumerate(last.backward))
        units[-1] = last._replace(backward=tuple(passed)), of_block, taken
    if train.activation_checkpointing:
        units = [(_computed_again([unit], depth, taken, 0), depth, taken) for unit, depth, taken in units]
        if segments:  # the input of a merging is a map, which stays anyway
            units = [(unit if depth else unit._replace(kept=0), depth, taken) for unit, depth, taken in units]
        if units and not share.first:  # what the first unit takes lies in the schedule's buffer, too
            units[0] = units[0][0]._replace(kept=0), *units[0][1:]
    if share.first:
        yield _embedding(shape, train, images, narrow, share)
    for number, (unit, _, _) in enumerate(units, 1):
        yield unit._replace(block=number)
    if share.last and not segments:
        yield _head(stages[-1], spec.num_classes or 0, images, narrow, train, share)


def _statistics(train: TrainSpec) -> int:
    """Bytes of a token's mean and deviation, which a norm keeps."""
    return 4 if train.precision == "bf16-params" else 8


def _embedding(shape: SwinShape, train: TrainSpec, images: int, narrow: int, share: Share) -> Part:
    tokens = images * model_counts.stages(shape, share.parallel.sequence)[0].tokens
    embedded = tokens * narrow * shape.hidden_size
    return Part(embedded + _statistics(train) * tokens, (0,), (embedded,), model_counts.swin(shape)[0].modules)


def _merge(stage: SwinStage, images: int, narrow: int, train: TrainSpec, waiting: int) -> Part:
    kept = images * model_counts.merge_kept_bytes(stage, train.precision)
    passed = narrow * images * stage.merged * 6 * stage.width
    return Part(kept, (0,), (passed + waiting,), model_counts.swin_merge(stage))


def _head(last: SwinStage, classes: int, images: int, narrow: int, train: TrainSpec, share: Share) -> Part:
    of_token = narrow * last.width + _statistics(train)
    kept = images * last.tokens * of_token + images * (narrow * last.width + 8 * classes)
    classifier = model_counts.linear(last.width, classes, 1, "outputs").part(share.parallel.tensor)
    return Part(kept, modules=(model_counts.norm(last.width), classifier), block=-1)


def _block(
    stage: SwinStage, number: int, images: int, narrow: int, train: TrainSpec, share: Share, waiting: int
) -> Part:
    """A block of Swin, with the moments at which it can be widest.

    In backward it can be widest in three places. The first is its MLP's second layer: what is passed on, and the
    gradient of that layer's input, four times as wide. The second, when all behind the attention is gone, is where its
    heads are scaled: that gradient is a sum over all scores (on a CPU in fp32 where they are narrow). The third is the
    network of its position biases, whose in-place ReLU takes four more tensors as large as what it keeps.

    At the end of forward Python holds the stage's input, the block's input, its last norm's output and the block's
    output; what windows were joined from; and where windows are padded or shifted (in odd blocks) what they were cut
    from, and what was joined before it is shifted back. Sequence ranks hold only the last norm's and the block's
    output; or, in attention, its scores a third time, and tensors by heads: what was exchanged (3), shifted or padded
    (3), cut into windows as values, and attention's output, in two orders.
    """
    ranks, odd = share.parallel.tensor, number % 2 > 0
    stream = images * narrow * stage.width * stage.tokens
    own = stream // ranks
    of_biases = narrow * model_counts.bias_kept(stage, ranks)
    of_network = narrow * stage.positions * model_counts.BIAS_WIDTH
    kept = images * model_counts.block_kept_bytes(stage, train.precision, ranks) + of_biases
    scores = images * narrow * stage.padded * stage.window**2 * stage.heads // (ranks * stage.ranks)
    summed = 3 if narrow == 2 and train.device == "cpu" else 2
    behind = stream + 8 * own  # 3 and 8 kept, and two gradients passed on
    by_heads = images * narrow * stage.padded * stage.width // (ranks * stage.ranks)
    if stage.ranks > 1:  # and attention's output, one gradient of which is by heads
        behind += stream + own - by_heads
    widest: tuple[int, ...] = (stream + 4 * own, summed * scores - behind, 5 * of_network - of_biases - behind)
    padded = images * narrow * stage.width * stage.padded
    modules = tuple(module.part(ranks) for module in model_counts.swin_block(stage).in_forward)
    several = stage.side > stage.window
    moved = several and (odd or stage.padded > stage.side**2)
    held: tuple[int, ...] = (4 * stream + padded * (3 if moved else several),)
    if stage.ranks > 1:
        held = (2 * stream, scores + by_heads * (9 if moved else 6) - 3 * stream - 9 * own)
    return Part(kept, held, tuple(waiting + own for own in widest), modules)


def _computed_again(parts: list[Part], depth: int, taken: int, waiting: int) -> Part:
    """A stage of `depth` blocks, and the merging behind them, that keeps only what it takes.

    When its blocks have gone forward again, the gradient of the merging's output is there, half as large.
    """
    kept, of_blocks = (sum(part.kept for part in own) for own in (parts, parts[:depth]))
    again = of_blocks + waiting - (taken // 2 if depth < len(parts) else 0)
    return Part(
        kept=taken,
        forward=tuple(part.kept + own - taken for part in parts for own in part.forward),
        backward=(
            *(of_blocks + own for part in parts[:depth] for own in part.backward),
            *(kept + own for part in parts[depth:] for own in part.backward),
            *(again + own for part in parts[:depth] for own in part.forward),
        ),
        modules=tuple(module for part in parts for module in part.modules),
    )


def _vit(spec: ModelSpec, train: TrainSpec, narrow: int, decoder: DecoderShape | None, share: Share) -> Iterator[Part]:
    """Yield a ViT's patches, its blocks, and what lies between them and its decoder; without a decoder its head."""
    plain = spec.model_copy(update={"task": "classification", "decoder_size": None, "auxiliary_weight": None})
    vit, shapes = vit_shape(plain), parameter_shapes(plain)
    if vit is None or shapes is None:
        return
    kept = activations(plain, train, vit, share)
    embedding, *alike, head = share.shapes(shapes).blocks
    blocks = share.blocks if share.chunks else vit.layers
    if share.first:
        yield Part(0, (0,), (2 * kept.stream,), embedding.in_forward)
    received = 0 if share.first else kept.stream  # in the schedule's buffer, as the gradient that is handed back is
    # A decoder's head is large beside the one token that a classifier reads: a block's input is still there.
    input_bytes = 0 if decoder is None else kept.stream
    for number in range(1, blocks + 1):
        kept_bytes = kept.kept_of_block - (received if number == 1 else 0)
        handed_back = kept.handed_back if number == blocks else 0
        yield Part(
            kept=kept_bytes,
            forward=(input_bytes,),
            backward=(kept.backward_of_block + kept.recomputed - handed_back,),
            modules=alike[0].in_forward,
            block=number * alike[0].wrapped,
            output_gradient=kept.stream - handed_back,
        )
    if not share.last:
        return
    if decoder is None:
        yield Part(kept=kept.head - (0 if blocks else received), modules=head.in_forward, block=-1)
    else:
        yield _pyramid(vit, decoder, train, narrow, share, stream=kept.stream - (0 if blocks else received))


def _pyramid(vit: VitShape, decoder: DecoderShape, train: TrainSpec, narrow: int, share: Share, *, stream: int) -> Part:
    """Return a ViT's last norm with each token's statistics, and the pyramid of maps that its decoder takes.

    The norm's output is kept where it is read: where ranks share the tokens, for all tokens of the images labelled
    here. `stream`: bytes of the norm's input.
    """
    images, parallel = largest_micro_batch(train), share.parallel
    labelled = math.ceil(images / parallel.sequence)
    width, grid = vit.hidden, decoder.sides[2]
    element_bytes = labelled * narrow * width
    maps = element_bytes * sum(side**2 for side in decoder.sides)
    tokens = math.ceil(vit.tokens / parallel.sequence)
    if parallel.shard_norms:
        tokens = math.ceil(tokens / parallel.tensor)
    kept = stream + images * tokens * _statistics(train)
    kept += labelled * model_counts.pyramid_kept_bytes(width, grid, narrow)
    if is_autocast(train):
        # The last norm's whole output, which pooling keeps, stays in fp32, and each of two convolutions casts it for
        # itself, as UperNet's convolutions do.
        kept += labelled * (vit.tokens * 4 * width - 2 * width + 2 * 2 * width * grid**2)
    modules = (model_counts.norm(width), *model_counts.pyramid(width, grid))
    return Part(kept, (0,), (maps + element_bytes * (2 * grid) ** 2,), modules, block=-1)


def _casting_anew(layers: list[DecoderLayer], decoder: DecoderShape) -> Iterator[DecoderLayer]:
    """Layers on maps in fp32, with what autocast makes them keep beside, in 16-bit elements.

    It casts a map for each convolution that takes it, the auxiliary head's included. The map that is pooled is kept as
    it is, twice as wide.
    """
    first_pooled, of_auxiliary = len(decoder.sides) - 1, len(layers) - 2
    for number, layer in enumerate(layers):
        again = decoder.widths[-1] * decoder.sides[-1] ** 2 if number == first_pooled else 0
        if decoder.auxiliary and number == of_auxiliary:
            again = layer.taken
        yield layer._replace(kept=layer.kept + again)


def _layer(layer: DecoderLayer, images: int, narrow: int, train: TrainSpec, *, over_ranks: bool) -> Part:
    """A decoder's layer: in backward ReLU and norm pass on as much as its output each, the convolution as its input.

    When the convolution's backward runs, norm and ReLU have let go of theirs. On a CPU oneDNN has copies, in blocks of
    channels, of a convolution's input, of its gradient and of its weights, in fp32 too where these are narrower. Norms
    over several ranks work on copies of what they normalise: three more.
    """
    normed = (5 if over_ranks else 2) * layer.given
    freed = 2 * layer.given if layer.norm else 0
    convolved = layer.taken + layer.given - freed
    on_cpu = train.device == "cpu"
    if on_cpu:
        convolved += layer.taken + layer.given
    weights = sum(module.elements for module in layer.modules)
    working = on_cpu * weights * (4 if narrow == 4 else 2 + 4)
    passed = (images * narrow * convolved + working, images * narrow * normed if layer.norm else 0)
    return Part(layer.kept * images * narrow, (0,), passed, layer.modules, block=-1)


def _loss(whole: int, held: int, pixels: int, decoder: DecoderShape, train: TrainSpec) -> Part:
    """Cross-entropy in fp32: for each head it keeps log-probabilities of each label and class.

    In forward the logits that are compared are there, on a CPU with a copy in another order of the axes, and an fp32
    copy of narrower logits. In backward the gradients of the log-probabilities and of the logits are there.

    Args:
        whole: elements of logits at the labels' size.
        held: elements of the first head's logits that the loop holds.
        pixels: number of labels.
        decoder: the heads that give logits.
        train: gives the device and the precision.
    """
    compared = decoder.auxiliary or held < whole
    widened = held if train.precision != "fp32" else 0
    forward = 4 * (whole * (compared + (train.device == "cpu")) + widened) + 12 * pixels
    return Part((1 + decoder.auxiliary) * 4 * whole, (forward,), (2 * 4 * whole + 12 * pixels,), block=-1)

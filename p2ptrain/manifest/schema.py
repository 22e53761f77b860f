"""The manifest schema: its sections, and the rules between fields of different sections.

Every field has a unit in its name or docstring. The docstrings become the comments of a generated ``manifest.toml``. An
inner step is one step of the inner optimizer; an outer step applies inner_steps of them to the slow weights.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from p2ptrain.base.codec_names import FRAGMENT_ALIGNMENT, GradientCodec, WeightCodec
from p2ptrain.manifest.decoder import MAX_LOGITS
from p2ptrain.manifest.model import Model, parameter_count
from p2ptrain.manifest.section import Digest, Section, Title
from p2ptrain.manifest.sources import BYTE_VOCABULARY, BuiltinCorpus, BytesTokenizer, Corpus, Tokenizer
from p2ptrain.recipes import RECIPES

NEEDS_EVERYBODY = frozenset(name for name, recipe in RECIPES.items() if recipe.is_collective)
"""Recipes that average over all peers at once."""

UNREAD = ("fp32", "int8")
"""Values of a codec field that the recipe does not use; presets and scenarios have one of them.

Any other format is rejected, since its author expects an effect that it would not have.
"""

MAX_TOKENS = 10**15
"""Most tokens of a run, some thirty times those of Qwen3 (arXiv 2505.09388)."""

MAX_STEP_TOKENS = 2**24
"""Most tokens of an inner step, four times the batch of the largest published runs. Guess: survey published runs."""


class RunSection(Section):
    """Name, author and end of the run."""

    name: Title
    """Name of the run for people: letters, digits, blanks, dots, dashes."""

    protocol: int = Field(ge=1, le=1_000_000)
    """Version of the protocol; peers of different versions never exchange."""

    public_key: Digest
    """Ed25519 key (hexadecimal) that signs this manifest; its secret half is run.key."""

    seed: int = Field(ge=0, le=2**63 - 1)
    """Determines the initial weights and, with a peer's id, the order in which that peer reads the corpus."""

    tokens: int = Field(ge=1, le=MAX_TOKENS)
    """Training tokens of all peers together at which the run ends."""


class TrainingSection(Section):
    """Inner optimization. Schedules run over the tokens of all peers."""

    sequence_length: int = Field(ge=8, le=131_072)
    """Tokens per training sequence."""

    sequences_per_step: int = Field(ge=1, le=65_536)
    """Sequences per inner step; small devices accumulate gradients to reach it."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the hidden matrices and AdamW for the rest. (adamw: usual; the presets use muon.)"""

    learning_rate: float = Field(gt=0, le=1)
    """Peak learning rate of AdamW; Muon's steps are scaled to the same size. More peers want a higher one: .003 was
    best for two small peers, .012 for eight (docs/results/tuning.md)."""

    warmup_tokens: int = Field(ge=0, le=MAX_TOKENS)
    """Tokens of all peers over which the learning rate rises linearly from zero."""

    schedule: Literal["cosine", "constant", "wsd"]
    """After the warm-up: cosine, constant, or wsd (constant, then a linear decay over the last fifth of the run)."""

    final_learning_rate_fraction: float = Field(ge=0, le=1)
    """Learning rate at the run's end as a fraction of the peak; schedule constant does not read it."""

    beta1: float = Field(ge=0, lt=1)
    """Decay of AdamW's first moment, per inner step."""

    beta2: float = Field(ge=0, lt=1)
    """Decay of AdamW's second moment, per inner step."""

    epsilon: float = Field(gt=0, le=0.1)
    """Added to the root of AdamW's second moment."""

    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon, per inner step; adamw does not read it. (.95: Muon's authors, and torch's default.)"""

    weight_decay: float = Field(ge=0, le=10)
    """Decoupled weight decay of matrices and embeddings."""

    gradient_clip: float = Field(gt=0, le=1e6)
    """Largest L2 norm of an inner step's gradient; longer ones are scaled down to it."""

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_length * self.sequences_per_step


class OuterSection(Section):
    """Outer optimization: how inner steps enter the slow weights, and how often peers exchange."""

    recipe: str = Field(max_length=64)
    """Recipe of the training: swarm (the default), local (no exchanges), or another of docs/ALGORITHMS.md."""

    inner_steps: int = Field(ge=1, le=100_000)
    """Inner steps between two outer steps, H."""

    learning_rate: float = Field(gt=0, le=2)
    """Outer learning rate eta; recipe local does not read it."""

    momentum: float = Field(ge=0, lt=1)
    """Outer momentum mu; .9 helps only in runs of hundreds of outer steps. Recipe local does not read it."""

    nesterov: bool
    """Whether the outer momentum is Nesterov's."""

    topology: Literal["random", "ring", "exponential", "complete"]
    """Possible partners; random allows all peers, with complete each peer exchanges with all at every outer step."""

    partners: int = Field(ge=1, le=64)
    """Concurrent partners if the recipe plans its exchanges; only topology random reads it."""

    weights: Literal["equal", "work"]
    """Weighting of two peers in their average: equal, or work (by the tokens per second of each)."""

    exchanges_per_step: int = Field(ge=0, le=64)
    """Exchanges a peer initiates per outer step; it answers about as many more.

    0 unless the recipe has random exchanges.
    """

    fragments: int = Field(ge=1, le=4_096)
    """Number of near-equal slices of the parameters, the units of exchange."""

    cut: Literal["even", "layers"] = "even"
    """Slices: even, or layers (whole layers or parts of one)."""

    fragments_per_exchange: int = Field(ge=1, le=4_096)
    """Slices sent in one exchange; at most fragments."""

    @model_serializer(mode="wrap")
    def _even_is_unsaid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out cut even, so that the RunId of a run that cuts evenly does not depend on this field."""
        data: dict[str, Any] = serialize(self)
        if data.get("cut") == "even":
            del data["cut"]
        return data

    def recipe_faults(self) -> list[str]:
        """Return the conflicts within this section and with its recipe, one sentence each."""
        recipe = RECIPES.get(self.recipe)
        if recipe is None:
            close = difflib.get_close_matches(self.recipe, RECIPES, n=1)
            meant = f"did you mean {close[0]}?" if close else f"recipes: {', '.join(RECIPES)}"
            return [f"outer.recipe: unknown recipe {self.recipe!r}; {meant}"]
        faults, exchanges = [], self.exchanges_per_step
        if recipe.is_random and exchanges == 0:
            faults.append(f"outer.exchanges_per_step: 0, and recipe {recipe.name} would train every peer alone")
        if not recipe.exchanges and exchanges > 0:
            faults.append(
                f"outer.exchanges_per_step: {exchanges}, and recipe {recipe.name} exchanges nothing; set it to 0"
            )
        elif not recipe.is_random and exchanges > 0:
            faults.append(
                f"outer.exchanges_per_step: {exchanges}, and recipe {recipe.name} plans its exchanges; set it to 0"
            )
        if self.partners > 1 and recipe.mixes and all(mix.who == "random" for mix in recipe.mixes):
            faults.append(
                f"outer.partners: {self.partners}, and recipe {recipe.name} has one partner at a time; set it to 1, and"
                " outer.exchanges_per_step to the number of exchanges per outer step"
            )
        if self.fragments == 1 and any(mix.share < 1 for mix in recipe.mixes):
            faults.append(f"outer.fragments: 1, and recipe {recipe.name} mixes a part of the fragments; set at least 2")
        if self.cut == "layers" and self.fragments == 1:
            faults.append("outer.cut: layers, and one fragment is not cut; set outer.fragments to at least 2, or even")
        if recipe.every_step and self.inner_steps != 1:
            faults.append(
                f"outer.inner_steps: {self.inner_steps}, and recipe {recipe.name} mixes after every inner step;"
                " set it to 1"
            )
        return faults


class CodecSection(Section):
    """Encoding of weights and pseudo-gradients in messages."""

    name: WeightCodec
    """Codec of weights: fp32, bf16, fp16, int8, int4 or modular8, 4, 3 or 2; the number is bits per weight."""

    block_size: int = Field(ge=16, le=FRAGMENT_ALIGNMENT)
    """Elements that share one scale or step width; divides 1024. fp32, bf16 and fp16 do not read it."""

    gradients: GradientCodec
    """Codec of pseudo-gradients, if the recipe mixes them: fp32, bf16, fp16, int8, int4, topk (.23 bits) or lowrank."""

    rank: int = Field(ge=1, le=4_096)
    """Rank of each matrix with gradients = lowrank."""

    adaptive: bool = False
    """Whether rank and inner_steps fall with the rank of the averages (DiLoCoX); for recipe dilocox and lowrank."""

    @model_serializer(mode="wrap")
    def _fixed_is_unsaid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a fixed rank, so that the RunId of a run with one does not depend on this field."""
        data: dict[str, Any] = serialize(self)
        if data.get("adaptive") is False:
            del data["adaptive"]
        return data

    def recipe_faults(self, name: str) -> list[str]:
        """Return the conflicts of this section with the recipe of that name, one sentence each."""
        recipe = RECIPES.get(name)
        if recipe is None or not recipe.exchanges:  # a solo run may keep its swarm's codecs, to be comparable
            return []
        if self.adaptive and not recipe.uses_late_gradients:
            return [f"codec.adaptive: true, and recipe {name} has a fixed rank; leave it out, or choose recipe dilocox"]
        if self.adaptive and self.gradients != "lowrank":
            return [f"codec.adaptive: true, and {self.gradients} has no rank; set codec.gradients to lowrank"]
        if self.gradients in UNREAD or recipe.mix("pseudo_gradient") is not None:
            return []
        return [
            f"codec.gradients: {self.gradients}, and recipe {name} mixes no pseudo-gradients, so it would have"
            " no effect; set it to int8 or fp32, which are then ignored, or choose a recipe that mixes them, such as"
            " swarm_gradients"
        ]


class SwarmSection(Section):
    """Late joining, and the end of the run."""

    catch_up_outer_steps: int = Field(ge=1, le=100_000)
    """A peer behind by more tokens than this many outer steps is a newcomer and downloads a live peer's weights."""

    final_disagreement: float = Field(gt=0, le=1)
    """At the run's end peers continue to average until their relative distance falls below this."""

    final_gossip_s: float = Field(ge=0, le=86_400)
    """Longest time in seconds that a peer goes on averaging after its own training ended."""


class AdmissionSection(Section):
    """Admission of peers; docs/SECURITY.md describes the policies and what they protect against."""

    policy: Literal["open", "invite", "allowlist"] = "open"
    """open: any peer with the link; invite: peers with an invite (p2ptrain invite); allowlist: peers named by admit."""


class Manifest(Section):
    """The immutable description of a run that all its peers share."""

    run: RunSection
    model: Model
    tokenizer: Tokenizer
    corpus: Corpus
    training: TrainingSection
    outer: OuterSection
    codec: CodecSection
    swarm: SwarmSection
    admission: AdmissionSection = AdmissionSection()

    @model_serializer(mode="wrap")
    def _open_is_unsaid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out policy open, so that the RunId of an open run does not depend on this section."""
        data: dict[str, Any] = serialize(self)
        if data.get("admission") == {"policy": "open"}:
            del data["admission"]
        return data

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        faults = [*_model_faults(self), *_corpus_faults(self), *_training_faults(self), *_outer_faults(self)]
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def tokens_per_outer_step(self) -> int:
        return self.training.tokens_per_step * self.outer.inner_steps


def _model_faults(manifest: Manifest) -> list[str]:
    model = manifest.model
    faults = model.shape_faults()
    vocabulary = model.config.vocab_size
    if isinstance(manifest.tokenizer, BytesTokenizer) and vocabulary < BYTE_VOCABULARY:
        faults.append(f"model.config.vocab_size: {vocabulary} is below the {BYTE_VOCABULARY} ids of tokenizer bytes")
    return faults


def _corpus_faults(manifest: Manifest) -> list[str]:
    if isinstance(manifest.corpus, BuiltinCorpus) and not isinstance(manifest.tokenizer, BytesTokenizer):
        return [
            "corpus.kind: builtin is read as bytes, and tokenizer.kind is file; to tokenize the shipped text, use"
            " p2ptrain init NEW_RUN --tokenizer FILE"
        ]
    return []


def _training_faults(manifest: Manifest) -> list[str]:
    training, config = manifest.training, manifest.model.config
    faults = []
    if training.sequence_length > config.max_position_embeddings:
        faults.append(
            f"training.sequence_length: {training.sequence_length} exceeds "
            f"model.config.max_position_embeddings, {config.max_position_embeddings}"
        )
    if training.sequence_length * config.vocab_size > MAX_LOGITS:
        faults.append(
            f"training.sequence_length: {training.sequence_length} x vocab_size {config.vocab_size} "
            f"exceeds {MAX_LOGITS:,} logits for a single sequence"
        )
    if training.tokens_per_step > MAX_STEP_TOKENS:
        faults.append(
            f"training.sequences_per_step: {training.tokens_per_step:,} tokens per inner step, "
            f"but at most {MAX_STEP_TOKENS:,} are allowed"
        )
    if training.warmup_tokens > manifest.run.tokens:
        faults.append(f"training.warmup_tokens: {training.warmup_tokens} exceeds run.tokens, {manifest.run.tokens}")
    return faults


def _outer_faults(manifest: Manifest) -> list[str]:
    outer, block_size = manifest.outer, manifest.codec.block_size
    faults = outer.recipe_faults() + manifest.codec.recipe_faults(outer.recipe)
    if outer.recipe in NEEDS_EVERYBODY and (outer.recipe, outer.topology) != ("diloco", "complete"):
        faults.append(
            f"outer.recipe: {outer.recipe} averages over all peers at once, which only the simulator supports; over the"
            " network use diloco with topology complete"
        )
    if outer.fragments_per_exchange > outer.fragments:
        faults.append(
            f"outer.fragments_per_exchange: {outer.fragments_per_exchange} exceeds outer.fragments, {outer.fragments}"
        )
    most_fragments = max(1, parameter_count(manifest.model) // FRAGMENT_ALIGNMENT)
    if outer.fragments > most_fragments:
        faults.append(f"outer.fragments: {outer.fragments} is too many for this model; at most {most_fragments}")
    if FRAGMENT_ALIGNMENT % block_size:
        faults.append(f"codec.block_size: {block_size} does not divide {FRAGMENT_ALIGNMENT}")
    if manifest.tokens_per_outer_step > manifest.run.tokens:
        faults.append(
            f"run.tokens: {manifest.run.tokens} ends the run before its first outer step, "
            f"which takes {manifest.tokens_per_outer_step} tokens"
        )
    return faults

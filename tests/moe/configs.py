"""Settings of a layer from the sizes that one rank holds, as most tests know them."""

from moe import ExpertShape, MoeRunnerConfig, RankPlace

ALONE = RankPlace()


def rank_config(
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    place: RankPlace = ALONE,
    **changes: object,
) -> MoeRunnerConfig:
    """`intermediate_size` is the rank's, without padding (0 on a rank that owns nothing, never the first);
    `num_experts` is the layer's.
    """
    shape = ExpertShape(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=max(1, intermediate_size * place.tp_size),
    )
    return MoeRunnerConfig(shape=shape, place=place.place, **changes)  # type: ignore[arg-type]

"""Self-checks of a layer of the bundled model in Triton's interpreter: intact, and with scales permuted on purpose.

Prints JSON: the error of the intact layer, and what the check said of the others.
"""

import dataclasses
import itertools
import json
import sys
from typing import Any

from moe import MoeA2ABackend, MoeBackend, MoeRunner, SelfCheckError, Topology
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.backends.triton.plans import PlanTable
from moe.check.selfcheck import check_layer
from moe.formats import ExpertWeights
from moe.kernels.plan import Plan
from tests.gpu.permuted_scales import MATRICES, ORDERS, permute_canonical, permute_processed, permute_tail, tiny_experts

LAYER, NUM_EXPERTS = 3, 2
PLAN = Plan(is_direct=False, block_m=16, block_n_1=128, block_n_2=128)  # others: interpreted_probes


def main(part: str) -> dict[str, Any]:
    """Permutations of weights before and after processing: the first of each kind, or the rest."""
    experts, config = tiny_experts(LAYER, NUM_EXPERTS)
    runner = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.NONE, config)
    topology = Topology()

    def prepared(experts: ExpertWeights) -> TritonMoeQuantInfo:
        return dataclasses.replace(TritonBackend().prepare(experts, config, topology), plans=PlanTable(((None, PLAN),)))

    intact = prepared(experts)
    broken = {}
    for matrix, order in itertools.product(MATRICES, ORDERS):
        if ((matrix, order) == (MATRICES[0], ORDERS[0])) == (part == "pick"):
            wrong = permute_canonical(experts, matrix, order)
            broken[f"canonical {matrix} {order}"] = prepared(wrong)
            broken[f"processed {matrix} {order}"] = permute_processed(intact, matrix, order)
            broken[f"tail of {matrix} {order}"] = permute_tail(intact, matrix, order)
    told: dict[str, Any] = {"intact": check_layer(runner, intact, experts, layer=LAYER, topology=topology).worst_error}
    for name, info in broken.items():
        try:
            told[name] = str(check_layer(runner, info, experts, layer=LAYER, topology=topology))
        except SelfCheckError as error:
            told[name] = str(error)
    return told


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)

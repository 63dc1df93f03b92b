"""Engine process with a fake model; the folder's name chooses a misbehaviour. Run by `EngineClient` in the tests."""

import dataclasses
import time

from engine.core import EngineCore
from engine.errors import EngineConfigError
from engine.worker import main
from tests.engine.fakes import FakeModel


class SlowModel(FakeModel):
    """Sleeps a little in every step, so that a test can be faster than it."""

    def __call__(self, batch, kv):
        time.sleep(0.01)
        return super().__call__(batch, kv)


class HangingModel(FakeModel):
    """Never comes back from a step with token 66 in it."""

    def __call__(self, batch, kv):
        if (batch.input_ids_T == 66).any():
            time.sleep(3600)
        return super().__call__(batch, kv)


class DeviceLossModel(FakeModel):
    """Loses its device in a step with token 66 in it."""

    def __call__(self, batch, kv):
        if (batch.input_ids_T == 66).any():
            import torch

            raise torch.AcceleratorError("the device fell off the bus")
        return super().__call__(batch, kv)


MODELS = {"slow": SlowModel, "hang": HangingModel, "device-loss": DeviceLossModel}


def build(setup):
    name = setup.config.model.name
    if name == "missing":
        raise EngineConfigError("model is missing: no such folder")
    if name == "bug":
        raise RuntimeError("a bug")
    if name == "loading":
        time.sleep(3600)
    config = dataclasses.replace(setup.config, page_size=4, num_pages=256)
    return EngineCore(config, MODELS.get(name, FakeModel)(max_model_len=512))


if __name__ == "__main__":
    main(build)

"""Settings of several ranks on the command line, and torchrun's variables."""

import pytest

from server.cli import all_settings, make_configs, torchrun_settings
from server.errors import SettingError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}  # fmt: skip


def test_under_torchrun_each_process_is_a_host_with_one_rank():
    values = {"tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 4}
    _, config, _ = make_configs(all_settings(), {**torchrun_settings(TORCHRUN, values), **values})
    assert list(config.local_ranks) == [3]
    assert (config.nnodes, config.base_gpu_id) == (4, 1)
    assert (config.master_addr, config.master_port) == ("10.0.0.1", 1234)


def test_variables_of_another_launcher_are_not_torchruns():
    assert torchrun_settings({"RANK": "3", "WORLD_SIZE": "4"}, {}) == {}


def test_torchrun_with_another_number_of_ranks_is_refused():
    with pytest.raises(SettingError, match=r"torchrun starts 4 processes, but .* is 2"):
        torchrun_settings(TORCHRUN, {"tensor_parallel_size": 2})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nnodes": 2, "tensor_parallel_size": 2}, "--master-addr: master_addr is missing"),
        ({"nnodes": 3, "tensor_parallel_size": 2}, "--nnodes: nnodes is 3: it must divide the 2 ranks"),
        (
            {"data_parallel_size": 2},
            "--expert-parallel-size: expert_parallel_size is 1 and data_parallel_size is 2: .* to 2",
        ),
        ({"expert_parallel_size": 2}, "--expert-parallel-size: expert_parallel_size is 2: it must divide the 1 ranks"),
    ],
)
def test_the_flag_to_change_is_named(values, message):
    with pytest.raises(SettingError, match=message):
        make_configs(all_settings(), values)

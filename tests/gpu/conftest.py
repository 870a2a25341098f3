import pytest
import torch


def pytest_collection_modifyitems(items):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "tests/gpu/" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.gpu)
        needed = next((mark.args[0] for mark in item.iter_markers("gpus")), 1)
        if gpus < needed:
            reason = f"needs {needed} CUDA device(s), found {gpus}"
            item.add_marker(pytest.mark.skip(reason=reason))

"""The recorded GPU machines of tests/wild/A-gpu, each through the command line. Values are worked out by hand."""

from pathlib import Path

from sections import codes, finding, section_of, words

import gpu_probe

CASES = Path(__file__).parent / "wild" / "A-gpu"
MIB = 1 << 20


def probe(case, capsys):
    """The section as `gpu_probe.py --replay CASE --json` prints it."""
    return section_of(gpu_probe.main, ["--replay", str(CASES / case)], capsys)


def test_a01_driver_library_mismatch(capsys):
    section = probe("A01-driver-library-mismatch", capsys)
    mismatch = finding(section, "driver-library-mismatch")
    assert (section["level"], mismatch["level"]) == ("fail", "fail")
    assert "570.195" in mismatch["what"] and "570.124.06" in mismatch["what"]
    assert section["observed"]["nvml_library_version"] == "570.195"
    assert section["observed"]["kernel_module_version"] == "570.124.06"
    assert section["observed"]["gpu_present"] is True and section["observed"]["gpu_usable"] is False
    assert "reboot" in mismatch["fix"][0]
    assert not {"no-gpu", "driver-missing"} & codes(section)
    assert "pip" not in words(section)


def test_a02_gb10_unified_memory(capsys):
    section = probe("A02-gb10-unified-memory", capsys)
    unified = finding(section, "unified-memory")
    assert (section["level"], unified["level"]) == ("ok", "ok") and unified["why"]
    (gpu,) = section["observed"]["gpus"]
    assert gpu["name"] == "NVIDIA GB10" and gpu["pci_bus_id"] == "0000000F:01:00.0"
    assert gpu["memory_total_bytes"] == 127600748 * 1024
    assert gpu["memory_free_bytes"] == 118566368 * 1024  # MemAvailable, nothing taken off
    assert gpu["memory_source"] == "system memory (unified)"
    assert gpu["power_limit_w"] is None and gpu["power_draw_w"] == 3.17
    assert section["observed"]["driver"] == "580.126.09" and section["observed"]["cuda_max"] == "13.0"
    assert section["observed"]["host"]["machine"] == "aarch64"
    assert section["observed"]["gpu_usable"] is True


def test_a03_driver_610_kmd_umd_header(capsys):
    section = probe("A03-driver-610-kmd-umd-header", capsys)
    assert section["level"] == "ok" and finding(section, "gpu-usable")["level"] == "ok"
    observed = section["observed"]
    assert (observed["driver"], observed["cuda_max"], observed["gpu_count"]) == ("610.43.02", "13.3", 2)
    for index, gpu in enumerate(observed["gpus"]):
        assert (gpu["index"], gpu["name"]) == (index, "NVIDIA B200")
        assert gpu["memory_total_bytes"] == 183359 * MIB and gpu["memory_used_bytes"] == 0
        assert gpu["power_limit_w"] == 1000 and gpu["mig_mode"] == "disabled"
        assert gpu["ecc_uncorrected_volatile"] == 0
    assert observed["torch_build"]["command"] == "python -m pip install torch==2.15.0"


def test_a04_mig_table_slices(capsys):
    section = probe("A04-mig-table-slices", capsys)
    assert section["level"] == "warn" and finding(section, "mig-enabled")["level"] == "warn"
    observed = section["observed"]
    assert observed["mig_enabled"] is True and observed["gpu_count"] == 1
    slices = observed["mig_devices"]
    assert [(s["gpu_instance"], s["compute_instance"], s["mig_device"]) for s in slices] == [
        (3, 0, 0),
        (5, 0, 1),
        (6, 0, 2),
    ]
    assert [s["memory_total_bytes"] for s in slices] == [19968 * MIB] * 3
    assert [s["memory_used_bytes"] for s in slices] == [14366 * MIB, 12 * MIB, 13 * MIB]
    assert observed["budget_bytes_for_one_process"] == 19956 * MIB
    assert observed["gpus"][0]["ecc_uncorrected_volatile"] is None
    assert any("CUDA_VISIBLE_DEVICES=MIG-" in fix for fix in finding(section, "mig-enabled")["fix"])
    assert "ecc-uncorrected" not in codes(section)


def test_a05_err_fan_and_power(capsys):
    section = probe("A05-err-fan-and-power", capsys)
    broken = finding(section, "sensor-error")
    assert (section["level"], broken["level"]) == ("warn", "warn")
    first, second = section["observed"]["gpus"]
    assert first["name"] == "NVIDIA GeForce RTX 2080 SUPER"
    assert (first["fan_pct"], first["power_draw_w"], first["power_limit_w"]) == (None, None, None)
    assert first["memory_total_bytes"] == 8192 * MIB and first["sensor_errors"] == ["fan"]
    assert (second["fan_pct"], second["power_draw_w"], second["power_limit_w"]) == (0, 14, 250)
    assert second["sensor_errors"] == [] and second["memory_total_bytes"] == 8192 * MIB
    assert "GPU 0" in broken["what"] and "stress-test" in " ".join(broken["fix"])
    assert section["observed"]["gpu_usable"] is True and "gpu-lost" not in codes(section)


def test_a06_gpu_is_lost(capsys):
    section = probe("A06-gpu-is-lost", capsys)
    lost = finding(section, "gpu-lost")
    assert (section["level"], lost["level"]) == ("fail", "fail")
    assert section["observed"]["lost_bus_ids"] == ["0000:02:00.0"]
    assert section["observed"]["lspci_rev_ff"] == ["02:00.0"]
    assert section["observed"]["kernel_log"]["xid"] == [79]
    assert section["observed"]["gpu_present"] is True
    assert "01:00.0" not in lost["what"] and "other 1 card" in lost["what"]
    assert "no-gpu" not in codes(section)
    assert "off and on" in lost["fix"][0]


def test_a07_wsl2_two_versions(capsys):
    section = probe("A07-wsl2-two-versions", capsys)
    wsl = finding(section, "wsl2")
    assert (section["level"], wsl["level"]) == ("ok", "ok") and wsl["why"]
    observed = section["observed"]
    assert (observed["driver"], observed["nvidia_smi_version"], observed["cuda_max"]) == ("531.29", "530.30.04", "12.1")
    assert "wsl2" in observed["host"]["environments"]
    (gpu,) = observed["gpus"]
    assert gpu["name"] == "NVIDIA GeForce RTX 4090" and gpu["memory_total_bytes"] == 24564 * MIB
    assert gpu["memory_used_bytes"] == 971 * MIB and gpu["ecc_mode"] == "off" and gpu["mig_mode"] is None
    assert "driver-library-mismatch" not in codes(section)
    assert "never install a Linux NVIDIA driver" in wsl["why"]
    assert not any(one["fix"] for one in section["findings"])


def test_a08_windows_wddm(capsys):
    section = probe("A08-windows-wddm", capsys)
    assert section["level"] == "ok" and finding(section, "wddm")["why"]
    observed = section["observed"]
    assert (observed["driver"], observed["cuda_max"], observed["driver_model"]) == ("560.94", "12.6", "WDDM")
    (gpu,) = observed["gpus"]
    assert gpu["memory_total_bytes"] == 10240 * MIB and gpu["memory_used_bytes"] == 1745 * MIB
    assert gpu["memory_free_bytes"] == 8495 * MIB and gpu["persistence_mode"] is None
    processes = [(p["pid"], p["kind"], p["memory_bytes"]) for p in observed["processes"]]
    assert processes == [(1404, "C+G", None), (9928, "C", None)]
    # CUDA 13 needs R580 on Windows, PyPI's Windows wheel is CPU only: cu126 of torch 2.14 is the newest that runs
    assert observed["torch_build"]["variant"] == "cu126" and observed["torch_build"]["release"] == "2.14.1"


def test_a09_npu_smi_dual_die(capsys):
    section = probe("A09-npu-smi-dual-die", capsys)
    alarm = finding(section, "npu-alarm")
    assert (section["level"], alarm["level"]) == ("warn", "warn")
    chips = section["observed"]["gpus"]
    assert section["observed"]["vendors"] == ["ascend"] and len(chips) == 4
    assert [(c["parent"], c["chip"], c["physical_id"]) for c in chips] == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
    assert [c["health"] for c in chips] == ["OK", "OK", "Alarm", "OK"]
    assert [c["memory_used_bytes"] // MIB for c in chips] == [57784, 2895, 3142, 2887]
    assert {c["memory_total_bytes"] // MIB for c in chips} == {65536}
    assert [c["power_draw_w"] for c in chips] == [178.9, None, 184.2, None]
    assert "phy-id 2" in alarm["what"] and "phy-id 0 has 7.57 GiB free" in alarm["why"]
    assert "pip install" not in words(section) and "torch_npu" in words(section)


def test_a10_rocm_dgpu_and_igpu(capsys):
    section = probe("A10-rocm-dgpu-and-igpu", capsys)
    ignored = finding(section, "amd-igpu-ignored")
    assert (section["level"], ignored["level"]) == ("ok", "ok") and "HIP_VISIBLE_DEVICES=0" in ignored["why"]
    card, integrated = section["observed"]["gpus"]
    assert (card["gfx"], card["role"]) == ("gfx1030", "training")
    assert card["memory_total_bytes"] == 17163091968 and card["memory_used_bytes"] == 692142080
    assert (integrated["gfx"], integrated["role"]) == ("gfx1036", "integrated, ignore")
    assert integrated["memory_total_bytes"] == 64 * MIB
    assert section["observed"]["budget_bytes_for_one_process"] == 17163091968 - 692142080
    assert "rocm" in section["observed"]["torch_build"]["variant"]


def test_a11_no_devices_were_found_blackwell(capsys):
    section = probe("A11-no-devices-were-found-blackwell", capsys)
    failed = finding(section, "adapter-init-failed")
    assert (section["level"], failed["level"]) == ("fail", "fail")
    assert "10de:2b85" in failed["what"] and "open" in failed["fix"][0]
    observed = section["observed"]
    assert observed["needs_open_kernel_modules"] is True and observed["proprietary_module_loaded"] is True
    assert observed["gpu_present"] is True and observed["gpu_usable"] is False
    assert "Above 4G" in " ".join(failed["fix"])
    assert "no-gpu" not in codes(section) and "pip install" not in words(section)


def test_a12_sm120_wheel_too_old(capsys):
    section = probe("A12-sm120-wheel-too-old", capsys)
    missing = finding(section, "torch-arch-missing")
    assert (section["level"], missing["level"]) == ("fail", "fail")
    assert "12.0" in missing["what"] and "sm_90" in missing["what"]
    assert section["observed"]["torch"]["devices"][0]["capability"] == "12.0"
    assert section["observed"]["gpu_present"] is True and section["observed"]["gpu_usable"] is False
    # a CUDA 12 build ran, so the driver is at least R570: the newest CUDA 12 build with sm_120 is torch 2.11 cu128
    assert "torch==2.11.0" in missing["fix"][0] and "cu128" in missing["fix"][0]
    assert "CUDA 12.8" in missing["fix"][1]
    assert "too old" not in words(section) and "torch-works" not in codes(section)


def test_a13_xml_v13_deprecated_fields(capsys):
    section = probe("A13-xml-v13-deprecated-fields", capsys)
    used = finding(section, "memory-in-use")
    assert (section["level"], used["level"]) == ("ok", "ok") and "list of processes is empty" in used["why"]
    assert (section["observed"]["driver"], section["observed"]["cuda_max"]) == ("590.44.01", "13.1")
    (gpu,) = section["observed"]["gpus"]
    assert (
        gpu["name"] == "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition" and gpu["architecture"] == "Blackwell"
    )
    sizes = [gpu[f"memory_{part}_bytes"] // MIB for part in ("total", "reserved", "used", "free")]
    assert sizes == [97887, 637, 65720, 31531]
    assert (gpu["power_draw_w"], gpu["power_limit_w"], gpu["temperature_c"]) == (3.99, 300.0, 24)
    assert gpu["mig_mode"] is None and gpu["pcie_gen"] == 1 and "temperature_limit_c" not in gpu
    assert not {"pcie-link-reduced", "too-hot", "throttled"} & codes(section)
    assert section["observed"]["budget_bytes_for_one_process"] == 31531 * MIB


def test_a14_query_csv_mixed_unavailable(capsys):
    section = probe("A14-query-csv-mixed-unavailable", capsys)
    assert section["level"] == "warn" and finding(section, "some-fields-unavailable")["level"] == "warn"
    gpus = section["observed"]["gpus"]
    assert [g["compute_capability"] for g in gpus] == ["6.1", "7.0", "8.6", "7.5", "8.0"]
    assert [g["bf16_native"] for g in gpus] == [False, False, True, False, True]
    assert [g["fan_pct"] for g in gpus] == [None, None, 0, 35, None]
    assert [g["power_limit_w"] for g in gpus] == [250.0, 250.0, None, None, 300.0]
    assert [g["memory_total_bytes"] // MIB for g in gpus] == [11264, 16384, 12288, 2048, 81920]
    assert gpus[4]["memory_used_bytes"] is None and gpus[4]["memory_free_bytes"] is None


def test_a15_dmesg_xid_triage(capsys):
    section = probe("A15-dmesg-xid-triage", capsys)
    hardware = finding(section, "hardware-xid")
    assert (section["level"], hardware["level"]) == ("fail", "fail")
    by_gpu = section["observed"]["kernel_log"]["by_gpu"]
    assert {bus: row["xids"] for bus, row in by_gpu.items()} == {
        "0000:cb:00": [13, 31],
        "0000:3b:00": [48, 63],
        "0000:9b:00": [94],
        "0000:b3:00": [79],
    }
    assert by_gpu["0000:cb:00"]["class"] == "application" and by_gpu["0000:3b:00"]["class"] == "memory hardware"
    assert (
        by_gpu["0000:9b:00"]["class"] == "contained ECC error" and "fallen off the bus" in by_gpu["0000:b3:00"]["class"]
    )
    assert "row remap" in by_gpu["0000:3b:00"]["action"] and "restart" in by_gpu["0000:9b:00"]["action"]
    assert (
        "power-cycle" in by_gpu["0000:b3:00"]["action"] and "not a reason to replace" in by_gpu["0000:cb:00"]["action"]
    )
    assert "cb:00" not in hardware["what"] and "cb:00" in finding(section, "application-xid")["what"]


def test_a16_vgpu_unlicensed(capsys):
    section = probe("A16-vgpu-unlicensed", capsys)
    licence = finding(section, "vgpu-unlicensed")
    assert (section["level"], licence["level"]) == ("warn", "warn") and "nvidia-gridd" in licence["fix"][0]
    (gpu,) = section["observed"]["gpus"]
    assert gpu["name"] == "NVIDIA L4-12Q" and gpu["virtualization"] == "vGPU"
    sizes = [gpu[f"memory_{part}_bytes"] // MIB for part in ("total", "free", "reserved")]
    assert sizes == [12288, 11495, 793]
    assert gpu["license"] == "Unlicensed (Restricted)"
    assert gpu["temperature_c"] is None and gpu["power_draw_w"] is None


def test_every_case_of_the_group_has_its_test():
    tested = Path(__file__).read_text(encoding="utf-8")
    for folder in CASES.iterdir():
        assert f'"{folder.name}"' in tested

# ruff: noqa: E501 (the outputs of tools are kept as they are)
"""Machines that differ from the recorded ones: other generations, vendors, languages and failures. One row a machine."""

import json

import pytest
from machines import machine

import gpu_probe

CASES = {}


def case(name, level, code, k, variables=None):
    """A machine, the level of its section, and a finding that it must have."""
    CASES[name] = (level, code, variables, k)


case(
    "card waits for a reset",
    "fail",
    "gpu-needs-reset",
    k={"nvidia-smi": ("Unable to determine the device handle for GPU 0000:0B:00.0: GPU requires reset\n", 255)},
)
case(
    "fabric manager not running",
    "fail",
    "fabric-not-ready",
    k={
        "nvidia-smi -q": """
==============NVSMI LOG==============

Driver Version                            : 570.86.15
CUDA Version                              : 12.8

Attached GPUs                             : 1
GPU 00000000:1B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Fabric
        State                             : In Progress
        Status                            : N/A
    FB Memory Usage
        Total                             : 81559 MiB
        Reserved                          : 551 MiB
        Used                              : 1 MiB
        Free                              : 81008 MiB
"""
    },
)
case(
    "nouveau in lsmod",
    "fail",
    "nouveau-in-use",
    k={
        "nvidia-smi": (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n",
            9,
        ),
        "lsmod": "Module                  Size  Used by\nnouveau              2334720  4\ndrm_ttm_helper         16384  1 nouveau\n",
    },
)
case(
    "amdgpu not loaded",
    "fail",
    "amdgpu-not-loaded",
    k={
        "rocm-smi": (
            "cat: /sys/module/amdgpu/initstate: No such file or directory\nERROR:root:Driver not initialized (amdgpu not found in modules)\n",
            1,
        )
    },
)
case(
    "firmware stopped without an Xid",
    "fail",
    "gpu-firmware-stopped",
    k={
        "dmesg": "[   24.302465] NVRM: GPU6 _kgspIsHeartbeatTimedOut: Heartbeat timed out, currentTimeMs 812751949 diff 6070 timeout 5200\n"
        "[   84.300488] NVRM: GPU6 _kgspLogRpcTimeout: ********** GSP Timeout **********\n"
    },
)
case(
    "card without power cables",
    "fail",
    "gpu-without-power",
    k={"nvidia-smi": ("Unable to query GPU 0000:01:00.0: Insufficient External Power\n", 8)},
)
case(
    "driver older than the card",
    "fail",
    "card-not-supported",
    k={
        "dmesg": "[    3.0] NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:2b85)\nNVRM: installed in this system is not supported by the\nNVRM: NVIDIA 550.54.15 driver release.\n",
        "nvidia-smi": ("No devices were found\n", 6),
    },
)
case(
    "card of a legacy branch",
    "fail",
    "card-not-supported",
    k={
        "dmesg": "[    3.0] NVRM: The NVIDIA GeForce GT 710 GPU installed in this system is\nNVRM:  supported through the NVIDIA 470.xx Legacy drivers. Please\nNVRM:  visit http://www.nvidia.com/object/unix.html for more\n",
        "nvidia-smi": ("No devices were found\n", 6),
    },
)
ONE_NEEDS_RESET = {
    "nvidia-smi --query-gpu=index,name,memory.total,memory.used,driver_version --format=csv": "index, name, memory.total [MiB], memory.used [MiB], driver_version\n0, NVIDIA A100-SXM4-40GB, 40960 MiB, 0 MiB, 550.54.15\n1, NVIDIA A100-SXM4-40GB, [GPU requires reset], [GPU requires reset], 550.54.15\n"
}
case("one of two cards waits for a reset", "fail", "gpu-needs-reset", k=ONE_NEEDS_RESET)
THOR = """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.00                 Driver Version: 580.00         CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA Thor                    Off |   00000000:01:00.0 Off |                  N/A |
| N/A   N/A  N/A             N/A  /  N/A  | Not Supported          |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
"""
case(
    "Jetson Thor",
    "ok",
    "torch-build",
    k={"nvidia-smi": THOR, "/proc/meminfo": "MemTotal: 128828416 kB\nMemAvailable: 120000000 kB\n"},
)

OLD_TABLE = """Mon Jun 10 10:10:10 2019
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 418.67       Driver Version: 418.67       CUDA Version: 10.1     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|===============================+======================+======================|
|   0  Tesla K80           Off  | 00000000:00:04.0 Off |                    0 |
| N/A   30C    P8    28W / 149W |      0MiB / 11441MiB |      0%      Default |
+-------------------------------+----------------------+----------------------+

+-----------------------------------------------------------------------------+
| Processes:                                                       GPU Memory |
|  GPU       PID   Type   Process name                             Usage      |
|=============================================================================|
|    0      1234      C   python3                                    1234MiB |
+-----------------------------------------------------------------------------+
"""
case("k80 old driver", "fail", "driver-too-old", k={"nvidia-smi": OLD_TABLE})
case(
    "command not found, no card",
    "warn",
    "no-gpu",
    k={
        "nvidia-smi": ("bash: nvidia-smi: command not found\n", 127),
        "lspci": "00:02.0 VGA compatible controller [0300]: Intel Corporation UHD Graphics 620 [8086:5917] (rev 07)\n",
    },
)
case("command not found only", "warn", "no-gpu", k={"nvidia-smi": ("/bin/sh: 1: nvidia-smi: not found", 127)})
case(
    "windows not recognized",
    "warn",
    "no-gpu",
    k={
        "nvidia-smi": (
            "'nvidia-smi' is not recognized as an internal or external command,\r\noperable program or batch file.\r\n",
            1,
        )
    },
)
case(
    "card without driver",
    "fail",
    "driver-missing",
    k={
        "nvidia-smi": ("bash: nvidia-smi: command not found\n", 127),
        "lspci -nn": "01:00.0 VGA compatible controller [0300]: NVIDIA Corporation GA104 [GeForce RTX 3070] [10de:2484] (rev a1)\n\tKernel driver in use: nouveau\n\tKernel modules: nvidiafb, nouveau\n",
    },
)
case(
    "pascal card without driver",
    "fail",
    "driver-missing",
    k={
        "nvidia-smi": ("bash: nvidia-smi: command not found\n", 127),
        "lspci -nn": "01:00.0 3D controller [0302]: NVIDIA Corporation GP104GL [Tesla P4] [10de:1bb3] (rev a1)\n",
    },
)
NOCOMM = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n"
case("no comm", "fail", "driver-not-running", k={"nvidia-smi": (NOCOMM, 9)})
case(
    "optimus",
    "fail",
    "gpu-powered-off",
    k={
        "nvidia-smi": (NOCOMM, 9),
        "lspci": "00:02.0 VGA compatible controller: Intel Corporation Alder Lake-P Integrated Graphics Controller (rev 0c)\n01:00.0 3D controller: NVIDIA Corporation GA107M [GeForce RTX 3050 Mobile] (rev ff)\n",
        "prime-select query": "intel\n",
    },
)
case(
    "optimus off2",
    "fail",
    "gpu-powered-off",
    k={
        "nvidia-smi": (NOCOMM, 9),
        "lspci": "00:02.0 VGA compatible controller: Intel Corporation Alder Lake-P Integrated Graphics Controller (rev 0c)\n01:00.0 3D controller: NVIDIA Corporation GA107M [GeForce RTX 3050 Mobile] (rev ff)\n",
    },
)
case(
    "secure boot",
    "fail",
    "driver-module-rejected",
    k={
        "nvidia-smi": (NOCOMM, 9),
        "dmesg": "[    8.1] Loading of module with unavailable key is rejected\n[   8.2] nvidia: loading out-of-tree module taints kernel.\n",
    },
)
case(
    "secure boot modprobe",
    "fail",
    "driver-module-rejected",
    k={
        "nvidia-smi": (NOCOMM, 9),
        "modprobe nvidia": ("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service\n", 1),
        "mokutil --sb-state": "SecureBoot enabled\n",
    },
)
case(
    "dkms",
    "fail",
    "driver-module-not-built",
    k={
        "nvidia-smi": (NOCOMM, 9),
        "modprobe nvidia": ("modprobe: FATAL: Module nvidia not found in directory /lib/modules/6.8.0-45-generic\n", 1),
        "dkms status": "nvidia/550.107.02, 6.8.0-44-generic, x86_64: installed\n",
        "uname -r": "6.8.0-45-generic",
    },
)
case(
    "nouveau",
    "fail",
    "nouveau-in-use",
    k={
        "nvidia-smi": (NOCOMM, 9),
        "lspci -nnk": "01:00.0 VGA compatible controller [0300]: NVIDIA Corporation GA104 [GeForce RTX 3070] [10de:2484] (rev a1)\n\tKernel driver in use: nouveau\n",
    },
)
case(
    "nvml unknown container",
    "fail",
    "nvml-unknown-error",
    k={"nvidia-smi": ("Failed to initialize NVML: Unknown Error\n", 255), "/proc/1/cgroup": "0::/docker/abc\n"},
)
case(
    "nvml unknown",
    "fail",
    "nvml-unknown-error",
    k={"docker exec c nvidia-smi": ("Failed to initialize NVML: Unknown Error", 255)},
)
case(
    "nvml insufficient perm",
    "fail",
    "gpu-permission-denied",
    k={"nvidia-smi": ("Failed to initialize NVML: Insufficient Permissions\n", 4)},
)
case(
    "nvml lib not found",
    "fail",
    "nvml-library-missing",
    k={
        "nvidia-smi": (
            "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA "
            "Display Driver is properly installed and present in your system.\nPlease also try adding directory "
            "that contains libnvidia-ml.so to your system PATH.\n",
            12,
        )
    },
)
case(
    "wsl blocked",
    "fail",
    "gpu-access-blocked",
    k={
        "nvidia-smi": (
            "Failed to initialize NVML: GPU access blocked by the operating system\nFailed to properly shut down "
            "NVML: GPU access blocked by the operating system\n",
            17,
        ),
        "/proc/version": "Linux version 5.15.90.1-microsoft-standard-WSL2 (a@b)",
    },
)
case("no devices bare", "fail", "no-devices-found", k={"nvidia-smi": ("No devices were found\n", 6)})
case(
    "mismatch old text",
    "fail",
    "driver-library-mismatch",
    k={
        "nvidia-smi": ("Failed to initialize NVML: Driver/library version mismatch\n", 18),
        "dmesg": "[1234.5] NVRM: API mismatch: the client has the version 535.129.03, but\n               NVRM: this kernel module has the version 535.113.01.  Please\n               NVRM: make sure that this kernel module and all NVIDIA driver\n               NVRM: components have the same version.\n",
    },
)
case(
    "lost in table",
    "fail",
    "gpu-lost",
    k={
        "nvidia-smi": """+-----------------------------------------------------------------------------+
| NVIDIA-SMI 470.57.02    Driver Version: 470.57.02    CUDA Version: 11.4     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|                               |                      |               MIG M. |
|===============================+======================+======================|
|   0  NVIDIA GeForce ...  Off  | 00000000:01:00.0 Off |                  N/A |
| 30%   35C    P8    20W / 350W |      5MiB / 24268MiB |      0%      Default |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+
|   1  ERR!                ERR! | 00000000:02:00.0 ERR! |                 ERR! |
|ERR!  ERR! ERR!    ERR! / ERR! |  22743MiB / 24268MiB | ERR!      ERR! |
|                               |                      |                 ERR! |
+-------------------------------+----------------------+----------------------+
"""
    },
)
case(
    "mig -L",
    "warn",
    "mig-enabled",
    k={
        "nvidia-smi -L": """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-7b3d5f2a-1111-2222-3333-444455556666)
  MIG 1g.5gb      Device  1: (UUID: MIG-7b3d5f2a-1111-2222-3333-444455556667)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a78)
"""
    },
)
case(
    "mig none",
    "fail",
    "mig-no-instances",
    k={
        "nvidia-smi": """+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 535.54.03              Driver Version: 535.54.03    CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |
|                                         |                      |               MIG M. |
|=========================================+======================+======================|
|   0  NVIDIA H100 80GB HBM3          On  | 00000000:01:00.0 Off |                   On |
| N/A   33C    P0             67W / 700W  |      1MiB / 81559MiB |     N/A      Default |
|                                         |                      |              Enabled |
+-----------------------------------------+----------------------+----------------------+

+---------------------------------------------------------------------------------------+
| MIG devices:                                                                          |
+------------------+--------------------------------+-----------+-----------------------+
|  No MIG devices found                                                                 |
+---------------------------------------------------------------------------------------+
"""
    },
)
case(
    "mig xml",
    "warn",
    "mig-enabled",
    k={
        "nvidia-smi -q -x": """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>535.104.12</driver_version><cuda_version>12.2</cuda_version><attached_gpus>1</attached_gpus>
<gpu id="00000000:C1:00.0"><product_name>NVIDIA A100-SXM4-80GB</product_name><product_architecture>Ampere</product_architecture>
<mig_mode><current_mig>Enabled</current_mig><pending_mig>Enabled</pending_mig></mig_mode>
<mig_devices><mig_device><index>0</index><gpu_instance_id>1</gpu_instance_id><compute_instance_id>0</compute_instance_id>
<ecc_error_count><volatile_count><sram_uncorrectable>0</sram_uncorrectable></volatile_count></ecc_error_count>
<fb_memory_usage><total>40192 MiB</total><reserved>1 MiB</reserved><used>37 MiB</used><free>40154 MiB</free></fb_memory_usage>
<bar1_memory_usage><total>65535 MiB</total><used>0 MiB</used><free>65535 MiB</free></bar1_memory_usage></mig_device></mig_devices>
<fb_memory_usage><total>81920 MiB</total><reserved>600 MiB</reserved><used>87 MiB</used><free>81232 MiB</free></fb_memory_usage>
<utilization><gpu_util>N/A</gpu_util></utilization>
<processes></processes></gpu></nvidia_smi_log>"""
    },
)
case(
    "tcc",
    "ok",
    "compute-driver-model",
    k={
        "nvidia-smi": """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 552.22                 Driver Version: 552.22         CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                     TCC/WDDM  | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA RTX A6000             TCC   |   00000000:01:00.0 Off |                  Off |
| 30%   47C    P8             28W /  300W |      10MiB /  49140MiB |      0%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
""".replace("\n", "\r\n")
    },
)
case(
    "mcdm",
    "ok",
    "compute-driver-model",
    k={
        "nvidia-smi.exe": """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 581.29                 KMD Version: 581.29         CUDA UMD Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                  Driver-Model | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA RTX PRO 6000 Blac...  MCDM  |   00000000:01:00.0 Off |                    0 |
| 30%   47C    P8             28W /  600W |      10MiB /  97887MiB |      0%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
"""
    },
)
case(
    "jetson orin",
    "warn",
    "jetson",
    k={
        "nvidia-smi": """+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 540.4.0                Driver Version: 540.4.0      CUDA Version: 12.6     |
|-----------------------------------------+----------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |
|                                         |                      |               MIG M. |
|=========================================+======================+======================|
|   0  Orin (nvgpu)                  N/A  | N/A              N/A |                  N/A |
| N/A   N/A  N/A               N/A /  N/A | Not Supported        |     N/A          N/A |
|                                         |                      |                  N/A |
+-----------------------------------------+----------------------+----------------------+
""",
        "/etc/nv_tegra_release": "# R36 (release), REVISION: 4.0, GCID: 37537400, BOARD: generic, EABI: aarch64, DATE: Fri Sep 13 04:36:44 UTC 2024\n",
        "/proc/meminfo": "MemTotal:       64349892 kB\nMemFree:        50000000 kB\nMemAvailable:   58000000 kB\n",
    },
)
case(
    "tegrastats",
    "warn",
    "jetson",
    k={
        "tegrastats": "10-31-2024 10:00:00 RAM 2448/7620MB (lfb 848x4MB) SWAP 0/3810MB (cached 0MB) CPU [2%@1190,0%@1190,0%@1190,1%@1190] EMC_FREQ 0%@2133 GR3D_FREQ 0%@[305] CPU@42.5C GPU@41.3C VDD_IN 4522mW/4522mW\n",
        "nvidia-smi": ("bash: nvidia-smi: command not found", 127),
    },
)
case(
    "journalctl xid 13",
    "warn",
    "application-xid",
    k={
        "journalctl -k -b": "Nov 30 10:00:00 myhost kernel: NVRM: Xid (PCI:0000:01:00): 13, pid=1234, name=python, Graphics SM Warp Exception\n"
    },
)
case(
    "kern.log 119",
    "fail",
    "hardware-xid",
    k={
        "/var/log/kern.log": "2026-11-30T10:00:00.123456+00:00 myhost kernel: [ 1234.5678] NVRM: Xid (PCI:0000:65:00): 119, pid=2345, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL)\n"
    },
)
case(
    "journal short-iso 74",
    "fail",
    "hardware-xid",
    k={
        "journalctl": "2026-11-30T10:00:00+0000 n kernel: NVRM: Xid (PCI:0000:17:00): 74, pid=<unknown>, name=<unknown>, NVLink: fatal error detected on link 6\n"
    },
)
case(
    "xid 45 only",
    "ok",
    "application-xid",
    k={"dmesg": "[1.0] NVRM: Xid (PCI:0000:01:00): 45, pid=99, name=python, Ch 00000008\n"},
)
case(
    "xid 154",
    "fail",
    "hardware-xid",
    k={
        "dmesg": "[1.0] NVRM: Xid (PCI:0000:01:00): 95, pid=99, name=python, Uncontained: LTC TAG\n[2.0] NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)\n"
    },
)
case(
    "amd-smi json",
    "ok",
    "gpu-usable",
    k={
        "amd-smi static --json": json.dumps(
            [
                {
                    "gpu": 0,
                    "asic": {
                        "market_name": "AMD Instinct MI300X",
                        "vendor_id": "0x1002",
                        "target_graphics_version": "gfx942",
                    },
                    "bus": {"bdf": "0000:0c:00.0"},
                    "vram": {"type": "HBM", "size": {"value": 196592, "unit": "MB"}},
                },
                {
                    "gpu": 1,
                    "asic": {"market_name": "AMD Instinct MI300X", "target_graphics_version": "gfx942"},
                    "vram": {"size": {"value": 196592, "unit": "MB"}},
                },
            ]
        ),
        "amd-smi metric --json": json.dumps(
            [
                {
                    "gpu": 0,
                    "usage": {"gfx_activity": {"value": 3, "unit": "%"}},
                    "power": {"socket_power": {"value": 148, "unit": "W"}},
                    "temperature": {"edge": "N/A", "hotspot": {"value": 41, "unit": "C"}},
                    "mem_usage": {
                        "total_vram": {"value": 196592, "unit": "MB"},
                        "used_vram": {"value": 283, "unit": "MB"},
                        "free_vram": {"value": 196309, "unit": "MB"},
                    },
                    "ecc": {"total_correctable_count": 0, "total_uncorrectable_count": 0},
                }
            ]
        ),
    },
)
case(
    "amd-smi gpu_data",
    "ok",
    "gpu-usable",
    k={
        "amd-smi metric -m --json": json.dumps(
            {
                "gpu_data": [
                    {
                        "gpu": 0,
                        "mem_usage": {
                            "total_vram": {"value": 24560, "unit": "MB"},
                            "used_vram": {"value": 1200, "unit": "MB"},
                            "free_vram": {"value": 23360, "unit": "MB"},
                        },
                    }
                ]
            }
        )
    },
)
case(
    "amd-smi table",
    "ok",
    "gpu-usable",
    k={
        "amd-smi": """+------------------------------------------------------------------------------+
| AMD-SMI 26.0.0+37d158ab      amdgpu version: 6.14.14  ROCm version: 7.0.0    |
| Platform: Linux Baremetal                                                    |
|-------------------------------------+----------------------------------------|
| BDF                        GPU-Name | Mem-Uti   Temp   UEC       Power-Usage |
| GPU  HIP-ID  OAM-ID  Partition-Mode | GFX-Uti    Fan               Mem-Usage |
|=====================================+========================================|
| 0000:05:00.0    AMD Instinct MI300X | 0 %      37 °C   0         148/750 W   |
|   0       0       2       SPX/NPS1  | 0 %        N/A           285/196592 MB |
+-------------------------------------+----------------------------------------+
"""
    },
)
case(
    "rocm-smi json",
    "ok",
    "amd-igpu-ignored",
    k={
        "rocm-smi --showmeminfo vram --json": json.dumps(
            {
                "card0": {
                    "VRAM Total Memory (B)": "25753026560",
                    "VRAM Total Used Memory (B)": "1024000000",
                    "Card Series": "Radeon RX 7900 XTX",
                    "GFX Version": "gfx1100",
                },
                "card1": {
                    "VRAM Total Memory (B)": "536870912",
                    "VRAM Total Used Memory (B)": "31000000",
                    "Card Series": "AMD Radeon Graphics",
                    "GFX Version": "gfx1036",
                },
                "system": {"Driver version": "6.7.0"},
            }
        )
    },
)
case(
    "rocm-smi text",
    "ok",
    "gpu-usable",
    k={
        "rocm-smi --showmeminfo vram": """
============================ ROCm System Management Interface ============================
GPU[0]		: VRAM Total Memory (B): 17163091968
GPU[0]		: VRAM Total Used Memory (B): 692142080
==========================================================================================
"""
    },
)
case(
    "rocm without its kernel module",
    "fail",
    "amdgpu-not-loaded",
    k={"rocm-smi": ("ERROR:root:Driver not initialized (amdgpu not found in modules)\n", 1)},
)
case(
    "gfx1031",
    "warn",
    "rocm-arch-missing",
    k={
        "rocm-smi --json": json.dumps(
            {
                "card0": {
                    "VRAM Total Memory (B)": "12868124672",
                    "VRAM Total Used Memory (B)": "10240000",
                    "Card Series": "Navi 22 [Radeon RX 6700 XT]",
                    "GFX Version": "gfx1031",
                }
            }
        )
    },
)
case(
    "xpu json",
    "ok",
    "torch-build",
    k={
        "xpu-smi discovery -j": json.dumps(
            {
                "device_list": [
                    {
                        "device_function_type": "physical",
                        "device_id": 0,
                        "device_name": "Intel(R) Data Center GPU Max 1550",
                        "device_type": "GPU",
                        "pci_bdf_address": "0000:29:00.0",
                        "vendor_name": "Intel(R) Corporation",
                    }
                ]
            }
        ),
        "xpu-smi discovery -d 0 -j": json.dumps(
            {
                "device_id": 0,
                "device_name": "Intel(R) Data Center GPU Max 1550",
                "memory_physical_size_byte": "137438953472",
            }
        ),
    },
)
case(
    "xpu table",
    "ok",
    "torch-build",
    k={
        "xpu-smi discovery": """+-----------+--------------------------------------------------------------------------------------+
| Device ID | Device Information                                                                   |
+-----------+--------------------------------------------------------------------------------------+
| 0         | Device Name: Intel(R) Arc(TM) A770 Graphics                                          |
|           | Vendor Name: Intel(R) Corporation                                                    |
|           | PCI BDF Address: 0000:03:00.0                                                        |
|           | DRM Device: /dev/dri/card1                                                           |
+-----------+--------------------------------------------------------------------------------------+
"""
    },
)
case("xpu none", "warn", "no-gpu", k={"xpu-smi discovery": ("No device discovered\n", 0)})
case(
    "npu 910B3",
    "ok",
    "torch-npu-pairing",
    k={
        "npu-smi info": """+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.5        36                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3162 / 65536         |
+===========================+===============+====================================================+
""",
        "/usr/local/Ascend/ascend-toolkit/latest/version.cfg": "# version: 1.0\nruntime_running_version=[7.6.0.1.220:8.2.RC1]\n",
    },
)
case(
    "npu 310P",
    "warn",
    "npu-for-inference",
    k={
        "npu-smi info": """+--------------------------------------------------------------------------------------------------------+
| npu-smi 23.0.2                                   Version: 23.0.2                                       |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 1       310P3                 | OK              | NA           40                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1851 / 21527                            |
+===============================+=================+======================================================+
"""
    },
)
case(
    "npu dcmi fail",
    "fail",
    "npu-smi-failed",
    k={"npu-smi info": ("dcmi model initialized failed, because the device is used. ret is -8020\n", 1)},
)
case(
    "apple",
    "ok",
    "torch-build",
    k={
        "sysctl -n machdep.cpu.brand_string": "Apple M2 Max\n",
        "uname -a": "Darwin mac.local 23.6.0 Darwin Kernel Version 23.6.0: Mon Jul 29 21:14:30 PDT 2024; root:xnu-10063 RELEASE_ARM64_T6020 arm64\n",
    },
)
case(
    "mac profiler",
    "ok",
    "torch-build",
    k={
        "system_profiler SPDisplaysDataType": "Graphics/Displays:\n\n    Apple M3 Pro:\n\n      Chipset Model: Apple M3 Pro\n      Type: GPU\n      Bus: Built-In\n      Total Number of Cores: 18\n      Vendor: Apple (0x106b)\n      Metal Support: Metal 3\n"
    },
)
case(
    "truncated table",
    "unknown",
    "tool-output-truncated",
    k={
        "nvidia-smi": """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.14              Driver Version: 550.54.14      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA L40S                    On  |   00000000:63:00.0 Off |                    0 |
| N/A   26C    P0 """
    },
)
case(
    "truncated xml",
    "unknown",
    "tool-output-truncated",
    k={
        "nvidia-smi -q -x": """<?xml version="1.0" ?>
<nvidia_smi_log><driver_version>535.104.12</driver_version><cuda_version>12.2</cuda_version><attached_gpus>2</attached_gpus>
<gpu id="00000000:C1:00.0"><product_name>NVIDIA A100-SXM4-80GB</product_name><fb_memory_usage><total>81920 MiB</total><used>87 MiB</used><free>81232 MiB</free></fb_mem"""
    },
)
case("empty", "unknown", "nvidia-smi-failed", k={"nvidia-smi": ""})
case(
    "chinese",
    "warn",
    "no-gpu",
    k={"nvidia-smi": ("'nvidia-smi' 不是内部或外部命令，也不是可运行的程序\n或批处理文件。\n".encode("gbk"), 1)},
)
case("chinese2", "warn", "no-gpu", k={"nvidia-smi": ("bash: nvidia-smi：未找到命令\n", 127)})
case("german", "warn", "no-gpu", k={"nvidia-smi": ("nvidia-smi: Kommando nicht gefunden.\n", 127)})
case(
    "powershell",
    "warn",
    "no-gpu",
    k={
        "nvidia-smi": (
            "nvidia-smi : The term 'nvidia-smi' is not recognized as the name of a cmdlet, function, script "
            "file, or operable program.\n",
            1,
        )
    },
)
case(
    "query units noheader",
    "ok",
    "gpu-usable",
    k={
        "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader": "NVIDIA GeForce RTX 4070 Ti, 12282 MiB, 551.86\n"
    },
)
case(
    "query no columns known",
    "ok",
    "gpu-usable",
    k={"nvidia-smi query": "NVIDIA GeForce RTX 4070 Ti, 12282 MiB, 551.86\n"},
)
case(
    "driver590 pascal",
    "fail",
    "driver-card-mismatch",
    k={
        "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv": "name, driver_version, memory.total [MiB]\nNVIDIA GeForce GTX 1080, 590.44.01, 8192 MiB\n"
    },
)
case(
    "full gpu",
    "warn",
    "memory-in-use",
    k={
        "nvidia-smi --query-gpu=name,memory.total,memory.used,memory.free --format=csv": "name, memory.total [MiB], memory.used [MiB], memory.free [MiB]\nNVIDIA GeForce RTX 3090, 24576 MiB, 24200 MiB, 76 MiB\n"
    },
)
case(
    "torch cpu json",
    "fail",
    "torch-cpu-build",
    k={
        "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader": "NVIDIA GeForce RTX 3090, 24576 MiB\n",
        "torch probe": json.dumps(
            {"torch.__version__": "2.3.1+cpu", "torch.version.cuda": None, "torch.cuda.is_available()": False}
        ),
    },
)
case(
    "torch traceback",
    "fail",
    "torch-library-missing",
    k={
        'python -c "import torch"': (
            'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n  File "/x/torch/__init__.py", line 229, in <module>\n    from torch._C import *\nImportError: libcupti.so.12: cannot open shared object file: No such file or directory\n',
            1,
        )
    },
)
case("torch segv", "fail", "torch-crashed", k={"torch probe": ("Segmentation fault (core dumped)\n", 139)})
case(
    "torch no module",
    "warn",
    "torch-missing",
    k={
        "torch probe": (
            'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nModuleNotFoundError: '
            "No module named 'torch'\n",
            1,
        )
    },
)
case(
    "torch p100 cu128",
    "fail",
    "torch-arch-missing",
    k={
        "torch probe": json.dumps(
            {
                "torch.__version__": "2.8.0+cu128",
                "torch.version.cuda": "12.8",
                "torch.cuda.is_available()": True,
                "device_count": 1,
                "get_device_name(0)": "Tesla P100-PCIE-16GB",
                "get_device_capability(0)": [6, 0],
                "get_arch_list()": ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
            }
        )
    },
)
case(
    "torch ok",
    "ok",
    "torch-works",
    k={
        "torch probe": json.dumps(
            {
                "torch.__version__": "2.8.0+cu128",
                "torch.version.cuda": "12.8",
                "torch.cuda.is_available()": True,
                "device_count": 1,
                "get_device_name(0)": "NVIDIA L4",
                "get_device_capability(0)": [8, 9],
                "get_arch_list()": ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
            }
        )
    },
)
case(
    "torch ptx",
    "ok",
    "torch-works",
    k={
        "torch probe": json.dumps(
            {
                "torch.__version__": "2.7.0+cu128",
                "torch.version.cuda": "12.8",
                "torch.cuda.is_available()": True,
                "device_count": 1,
                "get_device_name(0)": "NVIDIA GB10",
                "get_device_capability(0)": [12, 1],
                "get_arch_list()": ["sm_80", "sm_90", "compute_120"],
            }
        )
    },
)
case(
    "torch old driver",
    "fail",
    "torch-driver-too-old",
    k={
        "torch probe": json.dumps(
            {
                "torch.__version__": "2.15.0+cu132",
                "torch.version.cuda": "13.2",
                "torch.cuda.is_available()": False,
                "device_count": 0,
            }
        ),
        "torch probe stderr": "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading and installing a new version\n",
    },
)
case(
    "A06 two lost lines",
    "fail",
    "gpu-lost",
    k={
        "nvidia-smi": (
            "Unable to determine the device handle for GPU0000:81:00.0: Unknown Error\nNo devices were found\n",
            255,
        )
    },
)
case(
    "-q ecc",
    "fail",
    "ecc-uncorrected",
    k={
        "nvidia-smi -q": """
==============NVSMI LOG==============

Timestamp                                 : Thu Sep 25 17:54:10 2025
Driver Version                            : 535.104.05
CUDA Version                              : 12.2

Attached GPUs                             : 1
GPU 00000000:31:00.0
    Product Name                          : NVIDIA A100-SXM4-40GB
    Product Architecture                  : Ampere
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    FB Memory Usage
        Total                             : 40960 MiB
        Reserved                          : 600 MiB
        Used                              : 0 MiB
        Free                              : 40360 MiB
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable            : 0
            DRAM Correctable              : 0
            DRAM Uncorrectable            : 2
        Aggregate
            SRAM Correctable              : 0
            SRAM Uncorrectable            : 0
            DRAM Correctable              : 5
            DRAM Uncorrectable            : 2
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 2
        Pending                           : Yes
        Remapping Failure Occurred        : No
    Clocks Throttle Reasons
        Idle                              : Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Not Active
            HW Power Brake Slowdown       : Not Active
        SW Thermal Slowdown               : Not Active
    Processes
        GPU instance ID                   : N/A
        Compute instance ID               : N/A
        Process ID                        : 2345
            Type                          : C
            Name                          : python3
            Used GPU Memory               : 1200 MiB
"""
    },
)


XML_OLD = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v10.dtd">
<nvidia_smi_log>
	<timestamp>Mon Jun 10 10:10:10 2019</timestamp>
	<driver_version>418.67</driver_version>
	<cuda_version>10.1</cuda_version>
	<attached_gpus>1</attached_gpus>
	<gpu id="00000000:00:1E.0">
		<product_name>Tesla V100-SXM2-16GB</product_name>
		<product_brand>Tesla</product_brand>
		<persistence_mode>Enabled</persistence_mode>
		<driver_model><current_dm>N/A</current_dm><pending_dm>N/A</pending_dm></driver_model>
		<minor_number>0</minor_number>
		<gpu_virtualization_mode><virtualization_mode>Pass-Through</virtualization_mode></gpu_virtualization_mode>
		<pci><pci_gpu_link_info><pcie_gen><max_link_gen>3</max_link_gen><current_link_gen>3</current_link_gen></pcie_gen><link_widths><max_link_width>16x</max_link_width><current_link_width>1x</current_link_width></link_widths></pci_gpu_link_info></pci>
		<fan_speed>N/A</fan_speed>
		<performance_state>P0</performance_state>
		<clocks_throttle_reasons>
			<clocks_throttle_reason_gpu_idle>Not Active</clocks_throttle_reason_gpu_idle>
			<clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
			<clocks_throttle_reason_hw_thermal_slowdown>Active</clocks_throttle_reason_hw_thermal_slowdown>
		</clocks_throttle_reasons>
		<fb_memory_usage><total>16130 MiB</total><used>15800 MiB</used><free>330 MiB</free></fb_memory_usage>
		<bar1_memory_usage><total>16384 MiB</total><used>2 MiB</used><free>16382 MiB</free></bar1_memory_usage>
		<utilization><gpu_util>98 %</gpu_util><memory_util>40 %</memory_util></utilization>
		<ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
		<ecc_errors><volatile><single_bit><total>0</total></single_bit><double_bit><device_memory>1</device_memory><total>1</total></double_bit></volatile></ecc_errors>
		<retired_pages><multiple_single_bit_retirement><retired_count>0</retired_count></multiple_single_bit_retirement><double_bit_retirement><retired_count>2</retired_count></double_bit_retirement><pending_retirement>Yes</pending_retirement></retired_pages>
		<temperature><gpu_temp>91 C</gpu_temp><gpu_temp_max_threshold>90 C</gpu_temp_max_threshold><gpu_temp_slow_threshold>87 C</gpu_temp_slow_threshold></temperature>
		<power_readings><power_draw>180.50 W</power_draw><power_limit>150.00 W</power_limit><default_power_limit>300.00 W</default_power_limit></power_readings>
		<clocks><sm_clock>900 MHz</sm_clock></clocks>
		<processes><process_info><pid>321</pid><type>C</type><process_name>python</process_name><used_memory>15700 MiB</used_memory></process_info></processes>
	</gpu>
</nvidia_smi_log>"""
case("xml v10", "fail", "ecc-uncorrected", k={"nvidia-smi -q -x": XML_OLD})
case(
    "inforom",
    "warn",
    "inforom-corrupted",
    k={
        "nvidia-smi": """WARNING: infoROM is corrupted at gpu 0000:01:00.0
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.14              Driver Version: 550.54.14      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
|   0  NVIDIA L40S                    On  |   00000000:01:00.0 Off |                    0 |
| N/A   26C    P0             39W /  350W |       0MiB /  46068MiB |      0%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
"""
    },
)
case(
    "driver not loaded",
    "fail",
    "driver-not-running",
    k={"nvidia-smi": ("Failed to initialize NVML: Driver Not Loaded\n", 9)},
)
case(
    "docker no toolkit",
    "fail",
    "container-runtime-missing",
    k={
        "docker run --rm --gpus all nvidia/cuda:12.4.1-base-ubuntu22.04 nvidia-smi": (
            'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].\n',
            125,
        )
    },
)
case(
    "container-cli",
    "fail",
    "driver-not-running",
    k={
        "docker run --gpus all x nvidia-smi": (
            "docker: Error response from daemon: failed to create task for container: ... nvidia-container-cli: "
            "initialization error: nvml error: driver not loaded: unknown.\n",
            125,
        )
    },
)
case(
    "handle not found",
    "fail",
    "gpu-lost",
    k={"nvidia-smi": ("Unable to determine the device handle for GPU 0000:0A:00.0: Not Found\n", 15)},
)
case(
    "kepler 470",
    "warn",
    "torch-build",
    k={
        "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader": "Tesla K80, 470.256.02, 11441 MiB\n"
    },
)
case(
    "gtx 680",
    "fail",
    "no-torch-build",
    k={
        "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader": "GeForce GTX 680, 470.256.02, 2001 MiB\n"
    },
)
case(
    "virtio",
    "warn",
    "no-gpu",
    k={
        "nvidia-smi": ("bash: nvidia-smi: command not found", 127),
        "lspci -nn": "00:01.0 VGA compatible controller [0300]: Red Hat, Inc. Virtio 1.0 GPU [1af4:1050] (rev 01)\n05:00.0 VGA compatible controller [0300]: ASPEED Technology, Inc. ASPEED Graphics Family [1a03:2000]\n",
    },
)
case(
    "sxid",
    "fail",
    "nvswitch-error",
    k={
        "dmesg": "[1.0] nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Fatal, Link 32 egress non-posted PRIV error\n"
    },
)
case(
    "amdgpu reset",
    "warn",
    "amdgpu-errors",
    k={
        "dmesg": "[100.1] amdgpu 0000:03:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=1234, emitted seq=1236\n[100.2] amdgpu 0000:03:00.0: amdgpu: GPU reset begin!\n"
    },
)
case(
    "oom",
    "warn",
    "host-memory-killed",
    k={"dmesg": "[100.1] Out of memory: Killed process 4321 (python3) total-vm:45678901kB, anon-rss:31234567kB\n"},
)
case(
    "rocm torch",
    "ok",
    "torch-works",
    k={
        "torch probe": json.dumps(
            {
                "torch.__version__": "2.9.0+rocm6.4",
                "torch.version.hip": "6.4.43482",
                "torch.version.cuda": None,
                "torch.cuda.is_available()": True,
                "device_count": 1,
                "get_device_name(0)": "AMD Radeon RX 7900 XTX",
                "get_arch_list()": ["gfx900", "gfx1100"],
            }
        )
    },
)
case(
    "torch nvcc mismatch noise",
    "ok",
    "torch-works",
    k={
        "torch probe": json.dumps(
            {
                "torch.__version__": "2.6.0+cu124",
                "torch.version.cuda": "12.4",
                "torch.cuda.is_available()": True,
                "device_count": 1,
                "get_device_name(0)": "NVIDIA GeForce RTX 3090",
                "get_device_capability(0)": [8, 6],
                "get_arch_list()": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
            }
        ),
        "nvcc --version": "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 11.8, V11.8.89\n",
    },
)
case(
    "rocm concise",
    "ok",
    "gpu-usable",
    k={
        "rocm-smi": """
========================= ROCm System Management Interface =========================
=================================== Concise Info ===================================
GPU  Temp (DieEdge)  AvgPwr  SCLK    MCLK     Fan  Perf  PwrCap  VRAM%  GPU%
0    45.0c           31.0W   800Mhz  1600Mhz  0%   auto  560.0W    0%   0%
1    43.0c           30.0W   800Mhz  1600Mhz  0%   auto  560.0W    0%   0%
====================================================================================
=============================== End of ROCm SMI Log ================================
"""
    },
)
case(
    "amd-smi static text",
    "ok",
    "gpu-usable",
    k={
        "amd-smi static": """GPU: 0
    ASIC:
        MARKET_NAME: AMD Instinct MI210
        VENDOR_ID: 0x1002
        TARGET_GRAPHICS_VERSION: gfx90a
    BUS:
        BDF: 0000:c3:00.0
    VRAM:
        TYPE: HBM
        SIZE: 65520 MB
"""
    },
)
case(
    "strix halo",
    "ok",
    "unified-memory-apu",
    k={
        "rocm-smi --json": json.dumps(
            {
                "card0": {
                    "VRAM Total Memory (B)": "536870912",
                    "VRAM Total Used Memory (B)": "200000000",
                    "Card Series": "Radeon 8060S Graphics",
                    "GFX Version": "gfx1151",
                }
            }
        ),
        "/proc/meminfo": "MemTotal:       131000000 kB\nMemAvailable:   120000000 kB\n",
    },
)
case(
    "raphael only",
    "warn",
    "integrated-only",
    k={
        "rocm-smi --json": json.dumps(
            {
                "card0": {
                    "VRAM Total Memory (B)": "536870912",
                    "VRAM Total Used Memory (B)": "200000000",
                    "Card Series": "Raphael",
                    "GFX Version": "gfx1036",
                }
            }
        )
    },
)
case(
    "xpu stats",
    "ok",
    "gpu-usable",
    k={
        "xpu-smi discovery -d 0": """+-----------+--------------------------------------------------------------------------------------+
| Device ID | Device Information                                                                   |
+-----------+--------------------------------------------------------------------------------------+
| 0         | Device Type: GPU                                                                     |
|           | Device Name: Intel(R) Data Center GPU Flex 170                                       |
|           | Memory Physical Size: 14248.00 MiB                                                   |
|           | Max Mem Alloc Size: 4095.99 MiB                                                      |
+-----------+--------------------------------------------------------------------------------------+
""",
        "xpu-smi stats -d 0": """+------------------------------+------------------------------------------------------------------+
| Device ID                    | 0                                                                |
+------------------------------+------------------------------------------------------------------+
| GPU Utilization (%)          | 0                                                                |
| GPU Power (W)                | 41                                                               |
| GPU Core Temperature (C)     | 45                                                               |
| GPU Memory Used (MiB)        | 1024                                                             |
+------------------------------+------------------------------------------------------------------+
""",
    },
)
case(
    "mixed nvidia amd",
    "ok",
    "mixed-cards",
    k={
        "nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv": "index, name, memory.total [MiB], driver_version\n0, NVIDIA GeForce RTX 4090, 24564 MiB, 570.124.06\n",
        "rocm-smi --json": json.dumps(
            {
                "card0": {
                    "VRAM Total Memory (B)": "25753026560",
                    "VRAM Total Used Memory (B)": "1024000000",
                    "Card Series": "Radeon RX 7900 XTX",
                    "GFX Version": "gfx1100",
                }
            }
        ),
    },
)
case(
    "kaggle t4",
    "warn",
    "no-native-bf16",
    variables={"KAGGLE_KERNEL_RUN_TYPE": "Interactive"},
    k={
        "nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv": "index, name, memory.total [MiB], driver_version\n0, Tesla T4, 15360 MiB, 560.35.03\n1, Tesla T4, 15360 MiB, 560.35.03\n"
    },
)
case("smi segfault", "unknown", "nvidia-smi-failed", k={"nvidia-smi": ("Segmentation fault (core dumped)\n", 139)})
case(
    "utf16",
    "ok",
    "gpu-usable",
    k={
        "nvidia-smi": (
            "\ufeff"
            + """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 551.86                 Driver Version: 551.86         CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                     TCC/WDDM  | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|=========================================+========================+======================|
|   0  NVIDIA GeForce RTX 4080      WDDM  |   00000000:01:00.0  On |                  N/A |
|  0%   47C    P8             28W /  320W |    1500MiB /  16376MiB |      0%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
"""
        ).encode("utf-16-le")
    },
)
case(
    "topo only",
    "warn",
    "no-gpu",
    k={"nvidia-smi topo -m": "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV12\t0-31\nGPU1\tNV12\t X \t0-31\n"},
)
case(
    "xml processes wddm",
    "ok",
    "wddm",
    k={
        "nvidia-smi -x -q": XML_OLD.replace("<current_dm>N/A", "<current_dm>WDDM")
        .replace("Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4080")
        .replace("<total>1</total>", "<total>0</total>")
        .replace(">Active<", ">Not Active<")
        .replace("91 C", "55 C")
        .replace("418.67", "551.86")
        .replace("10.1", "12.4")
        .replace("15800", "1500")
        .replace(">330 ", ">14630 ")
        .replace(">Yes<", ">No<")
        .replace("<retired_count>2", "<retired_count>0")
        .replace("Pass-Through", "None")
        .replace("1x<", "16x<")
        .replace("15700 MiB", "N/A")
    },
)
case(
    "gb10 xml",
    "ok",
    "unified-memory",
    k={
        "nvidia-smi -q -x": '<?xml version="1.0" ?>\n<nvidia_smi_log><driver_version>580.95.05</driver_version><cuda_version>13.0</cuda_version><attached_gpus>1</attached_gpus><gpu id="0000000F:01:00.0"><product_name>NVIDIA GB10</product_name><product_architecture>Blackwell</product_architecture><mig_mode><current_mig>N/A</current_mig></mig_mode><fb_memory_usage><total>N/A</total><reserved>N/A</reserved><used>N/A</used><free>N/A</free></fb_memory_usage><temperature><gpu_temp>40 C</gpu_temp></temperature></gpu></nvidia_smi_log>',
        "/proc/meminfo": "MemTotal: 127600748 kB\nMemAvailable: 100000000 kB\n",
    },
)
case(
    "orin nano tegrastats old",
    "warn",
    "jetson",
    k={
        "/etc/nv_tegra_release": "# R32 (release), REVISION: 7.1, GCID: 29818004, BOARD: t210ref, EABI: aarch64, DATE: Sat Feb 19 17:05:08 UTC 2022",
        "tegrastats": "RAM 1024/3956MB (lfb 400x4MB) SWAP 0/1978MB (cached 0MB) IRAM 0/252kB(lfb 252kB) CPU [10%@1479,off,off,5%@1479] EMC_FREQ 0% GR3D_FREQ 99% PLL@30C CPU@33C PMIC@100C GPU@31.5C AO@39C thermal@32.25C\n",
        "/proc/device-tree/model": "NVIDIA Jetson Nano Developer Kit\x00",
    },
)
case(
    "mps torch",
    "ok",
    "torch-works",
    k={
        "torch probe": json.dumps(
            {
                "torch.__version__": "2.9.0",
                "torch.version.cuda": None,
                "torch.cuda.is_available()": False,
                "torch.backends.mps.is_available()": True,
            }
        ),
        "uname -a": "Darwin mac 23.6.0 Darwin Kernel Version 23.6.0: x arm64",
        "sysctl -n machdep.cpu.brand_string": "Apple M2\n",
    },
)


case(
    "journal json",
    "warn",
    "application-xid",
    k={
        "journalctl -k -o json": json.dumps(
            {
                "MESSAGE": "NVRM: Xid (PCI:0000:01:00): 31, pid=12, name=python, Ch 00000008, MMU Fault",
                "_HOSTNAME": "h",
                "PRIORITY": "3",
            }
        )
        + "\n"
    },
)
case(
    "win events list",
    "fail",
    "gpu-removed",
    k={
        "Get-WinEvent System": "TimeCreated                     Id LevelDisplayName Message\n-----------                     -- ---------------- -------\n11/30/2026 10:00:00 AM         153 Error            \\Device\\Video3 Error occurred on GPUID: 100. GPU has fallen off the bus nvlddmkm\n"
    },
)
case(
    "win tdr",
    "warn",
    "tdr-reset",
    k={"event log": "Display driver nvlddmkm stopped responding and has successfully recovered.\n"},
)
case(
    "wsl with linux driver",
    "warn",
    "wsl-linux-driver",
    k={
        "/proc/version": "Linux version 5.15.153.1-microsoft-standard-WSL2 (x)",
        "ldconfig -p": "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1\n\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/wsl/lib/libcuda.so.1\n",
        "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv": "name, driver_version, memory.total [MiB]\nNVIDIA GeForce RTX 3080, 551.86, 10240 MiB\n",
    },
)
case(
    "stub path",
    "warn",
    "libcuda-hidden",
    variables={"LD_LIBRARY_PATH": "/usr/local/cuda/lib64/stubs:/usr/local/cuda/lib64"},
    k={
        "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv": "name, driver_version, memory.total [MiB]\nNVIDIA GeForce RTX 3080, 551.86, 10240 MiB\n"
    },
)
ONE_CARD = """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.14              Driver Version: 550.54.14      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
|   0  NVIDIA L40S                    On  |   00000000:01:00.0 Off |                    0 |
| N/A   26C    P0             39W /  350W |       0MiB /  46068MiB |      0%   MODE |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
"""
case("prohibited", "fail", "compute-prohibited", k={"nvidia-smi": ONE_CARD.replace("MODE", "Prohibited")})
case("exclusive", "ok", "compute-exclusive", k={"nvidia-smi": ONE_CARD.replace("MODE", "E. Process")})
case(
    "card missing ff",
    "fail",
    "gpu-lost",
    k={
        "nvidia-smi": ONE_CARD.replace("MODE", "Default"),
        "lspci -nn": "01:00.0 3D controller [0302]: NVIDIA Corporation AD102GL [L40S] [10de:26b9] (rev a1)\n02:00.0 3D controller [0302]: NVIDIA Corporation AD102GL [L40S] [10de:26b9] (rev ff)\n",
    },
)
case(
    "card missing",
    "warn",
    "card-not-listed",
    k={
        "nvidia-smi": ONE_CARD.replace("MODE", "Default"),
        "lspci -nn": "01:00.0 3D controller [0302]: NVIDIA Corporation AD102GL [L40S] [10de:26b9] (rev a1)\n02:00.0 3D controller [0302]: NVIDIA Corporation AD102GL [L40S] [10de:26b9] (rev a1)\n",
    },
)
case(
    "compute apps",
    "ok",
    "memory-in-use",
    k={
        "nvidia-smi --query-gpu=index,name,memory.total,memory.used --format=csv": "index, name, memory.total [MiB], memory.used [MiB]\n0, NVIDIA GeForce RTX 3090, 24576 MiB, 9000 MiB\n",
        "nvidia-smi --query-compute-apps=pid,process_name,used_gpu_memory --format=csv": "pid, process_name, used_gpu_memory [MiB]\n4242, /usr/bin/ollama, 8900 MiB\n",
    },
)
case(
    "npu torch mismatch",
    "fail",
    "torch-npu-mismatch",
    k={
        "npu-smi info": """+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.5        36                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3162 / 65536         |
+===========================+===============+====================================================+
""",
        "torch probe": json.dumps(
            {"torch.__version__": "2.4.0", "torch_npu.__version__": "2.1.0.post10", "torch.npu.is_available()": False}
        ),
    },
)
case(
    "hidden",
    "warn",
    "cuda-visible-devices",
    variables={"CUDA_VISIBLE_DEVICES": ""},
    k={"nvidia-smi": ONE_CARD.replace("MODE", "Default")},
)
case(
    "torch t4 bf16 true",
    "warn",
    "no-native-bf16",
    k={
        "torch probe": json.dumps(
            {
                "torch.__version__": "2.9.0+cu126",
                "torch.version.cuda": "12.6",
                "torch.cuda.is_available()": True,
                "device_count": 1,
                "get_device_name(0)": "Tesla T4",
                "get_device_capability(0)": [7, 5],
                "torch.cuda.is_bf16_supported()": True,
                "get_arch_list()": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
            }
        )
    },
)
case(
    "container without the compute capability",
    "fail",
    "cuda-library-missing",
    k={"nvidia-smi": ONE_CARD.replace("MODE", "Default").replace("CUDA Version: 12.4", "CUDA Version: N/A ")},
)


def probe(folder, capsys):
    code = gpu_probe.main(["--replay", str(folder), "--json"])
    section = json.loads(capsys.readouterr().out)
    assert code == {"ok": 0, "warn": 0, "unknown": 3, "fail": 1}[section["level"]]
    return section


@pytest.mark.parametrize("name", CASES)
def test_machine(name, tmp_path, capsys):
    level, code, variables, kinds = CASES[name]
    section = probe(machine(tmp_path / "m", variables, kinds=kinds), capsys)
    assert (section["level"], code in {one["code"] for one in section["findings"]}) == (level, True), section[
        "findings"
    ]
    for one in section["findings"]:
        if one["level"] != "ok":
            assert one["why"] and one["fix"] and one["source"], one
        assert "\n" not in one["what"] and "None" not in one["what"], one


def seen(name, tmp_path, capsys):
    _, _, variables, kinds = CASES[name]
    return probe(machine(tmp_path / "m", variables, kinds=kinds), capsys)["observed"]


MIB = 1 << 20


def test_the_old_two_line_table_is_read(tmp_path, capsys):
    observed = seen("k80 old driver", tmp_path, capsys)
    (gpu,) = observed["gpus"]
    assert (gpu["name"], gpu["memory_total_bytes"], gpu["ecc_uncorrected_volatile"]) == ("Tesla K80", 11441 * MIB, 0)
    assert (observed["driver"], observed["cuda_max"]) == ("418.67", "10.1")
    assert [(p["pid"], p["memory_bytes"]) for p in observed["processes"]] == [(1234, 1234 * MIB)]


def test_a_lost_card_does_not_take_the_other_one_with_it(tmp_path, capsys):
    observed = seen("lost in table", tmp_path, capsys)
    first, second = observed["gpus"]
    assert first["memory_total_bytes"] == 24268 * MIB and "lost" not in first
    assert second["lost"] is True and second["name"] is None
    assert observed["budget_bytes_for_one_process"] == (24268 - 5) * MIB


def test_mig_slices_of_the_list_and_of_xml(tmp_path, capsys):
    observed = seen("mig -L", tmp_path, capsys)
    assert [s["mig_profile"] for s in observed["mig_devices"]] == ["3g.20gb", "1g.5gb"]
    assert observed["gpu_count"] == 2 and "uuid" not in json.dumps(observed).lower().replace("mig-<uuid>", "")
    (part,) = seen("mig xml", tmp_path / "x", capsys)["mig_devices"]
    assert (part["memory_total_bytes"], part["memory_free_bytes"]) == (40192 * MIB, 40154 * MIB)
    assert (part["gpu_instance"], part["compute_instance"], part["compute_capability"]) == (1, 0, "8.0")


def test_a_jetson_gets_the_memory_of_the_system(tmp_path, capsys):
    (gpu,) = seen("jetson orin", tmp_path, capsys)["gpus"]
    assert (gpu["memory_total_bytes"], gpu["memory_free_bytes"]) == (64349892 * 1024, 58000000 * 1024)
    assert gpu["compute_capability"] == "8.7" and gpu["power_limit_w"] is None
    (gpu,) = seen("tegrastats", tmp_path / "x", capsys)["gpus"]
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"]) == (7620 * MIB, 2448 * MIB)


def test_amd_tools_agree_on_what_a_card_has(tmp_path, capsys):
    first, second = seen("amd-smi json", tmp_path / "a", capsys)["gpus"]
    assert (first["name"], first["gfx"], first["memory_total_bytes"]) == ("AMD Instinct MI300X", "gfx942", 196592 * MIB)
    assert (first["memory_used_bytes"], first["memory_free_bytes"]) == (283 * MIB, 196309 * MIB)
    assert first["temperature_c"] == 41 and first["power_draw_w"] == 148 and second["memory_used_bytes"] is None
    (gpu,) = seen("amd-smi table", tmp_path / "b", capsys)["gpus"]
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"]) == (196592 * MIB, 285 * MIB)
    assert (gpu["temperature_c"], gpu["power_draw_w"], gpu["power_limit_w"]) == (37, 148, 750)
    (gpu,) = seen("rocm-smi text", tmp_path / "c", capsys)["gpus"]
    assert (gpu["memory_total_bytes"], gpu["memory_used_bytes"]) == (17163091968, 692142080)


def test_ascend_boards_of_other_generations(tmp_path, capsys):
    observed = seen("npu 910B3", tmp_path / "a", capsys)
    (chip,) = observed["gpus"]
    assert (chip["memory_total_bytes"], chip["memory_used_bytes"]) == (65536 * MIB, 3162 * MIB)
    assert (chip.get("physical_id"), observed["cann"]) == (None, "8.2.RC1")
    (chip,) = seen("npu 310P", tmp_path / "b", capsys)["gpus"]
    assert (chip["memory_total_bytes"], chip["memory_used_bytes"]) == (21527 * MIB, 1851 * MIB)


def test_intel_sizes_come_from_the_details(tmp_path, capsys):
    (gpu,) = seen("xpu json", tmp_path, capsys)["gpus"]
    assert gpu["memory_total_bytes"] == 137438953472 and gpu["memory_free_bytes"] is None


def test_windows_line_ends_and_driver_models(tmp_path, capsys):
    observed = seen("tcc", tmp_path / "a", capsys)
    assert observed["driver_model"] == "TCC" and observed["gpus"][0]["memory_total_bytes"] == 49140 * MIB
    assert seen("mcdm", tmp_path / "b", capsys)["driver_model"] == "MCDM"


def test_a_truncated_answer_gives_what_it_holds(tmp_path, capsys):
    (gpu,) = seen("truncated table", tmp_path / "a", capsys)["gpus"]
    assert gpu["name"] == "NVIDIA L40S" and gpu["memory_total_bytes"] is None
    (gpu,) = seen("truncated xml", tmp_path / "b", capsys)["gpus"]
    assert gpu["memory_free_bytes"] == 81232 * MIB


def test_the_long_text_log_is_read(tmp_path, capsys):
    observed = seen("-q ecc", tmp_path, capsys)
    (gpu,) = observed["gpus"]
    assert gpu["ecc_uncorrected_volatile"] == 2 and gpu["row_remap_pending"] is True
    assert gpu["memory_reserved_bytes"] == 600 * MIB
    assert [(p["pid"], p["name"], p["memory_bytes"]) for p in observed["processes"]] == [(2345, "python3", 1200 * MIB)]


PERSISTENCE = """Mon Jun 10 10:10:10 2024
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.86.15              Driver Version: 570.86.15      CUDA Version: 12.8     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|=========================================+========================+======================|
|   0  NVIDIA A100-SXM4-80GB          MODE |   00000000:07:00.0 SHOW |                    0 |
| N/A   31C    P0             62W /  400W |       4MiB /  81920MiB |      0%      Default |
+-----------------------------------------+------------------------+----------------------+
"""


@pytest.mark.parametrize(
    ("mode", "display", "more", "told"),
    [
        ("Off", "Off", {}, True),
        ("On ", "Off", {}, False),
        ("Off", "On ", {}, False),  # the display server holds the card open
        ("Off", "Off", {"/proc/version": "Linux version 5.15.153.1-microsoft-standard-WSL2 (gcc) #1 SMP\n"}, False),
    ],
)
def test_persistence_mode_off_is_a_note_where_it_matters(mode, display, more, told, tmp_path, capsys):
    table = PERSISTENCE.replace("MODE", f"{mode:>3}"[:4]).replace("SHOW", display)
    section = probe(machine(tmp_path / "m", kinds={"nvidia-smi": table, **more}), capsys)
    found = [one for one in section["findings"] if one["code"] == "persistence-off"]
    assert bool(found) is told, section["observed"]["gpus"]
    assert not found or (found[0]["level"] == "ok" and "1 card" in found[0]["what"] and "-pm 1" in found[0]["fix"][1])


def test_the_build_for_an_old_driver_comes_from_the_warning_alone(tmp_path, capsys):
    """ "found version 12040" is CUDA 12.4, the branch R550: cu126 of torch 2.14 is the newest build that runs."""
    _, _, variables, kinds = CASES["torch old driver"]
    section = probe(machine(tmp_path / "m", variables, kinds=kinds), capsys)
    (one,) = [one for one in section["findings"] if one["code"] == "torch-driver-too-old"]
    assert "torch==2.14.1" in one["fix"][0] and "cu126" in one["fix"][0]
    assert not any("whl/cpu" in fix for other in section["findings"] for fix in other["fix"])


# --- damaged answers


def spoiled(answer, random):
    """An answer cut short, with a part missing, with odd bytes in it, or with its lines in another order."""
    kind = random.randrange(4)
    if kind == 0:
        return answer[: random.randrange(len(answer) + 1)]
    if kind == 1:
        first, last = sorted(random.randrange(len(answer) + 1) for _ in range(2))
        return answer[:first] + answer[last:]
    if kind == 2:
        changed = bytearray(answer)
        for _ in range(random.randrange(1, 12)):
            if changed:
                changed[random.randrange(len(changed))] = random.choice(b'0123456789|+-/ \n\r\tNA%:,.[]{}<>"\x00\xff')
        return bytes(changed)
    lines = answer.split(b"\n")
    random.shuffle(lines)
    return b"\n".join(lines)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_answers_are_judged_and_never_a_crash(seed, tmp_path, capsys):
    import random

    dice = random.Random(seed)
    machines = [kinds for _, _, _, kinds in CASES.values()]
    for number in range(60):
        kinds = {}
        for kind, answer in dice.choice(machines).items():
            text, code = answer if isinstance(answer, tuple) else (answer, 0)
            kinds[kind] = (spoiled(text if isinstance(text, bytes) else text.encode(), dice), code)
        section = probe(machine(tmp_path / str(number), kinds=kinds), capsys)
        for one in section["findings"]:
            assert one["code"] != "check-crashed", (one, kinds)
            assert one["level"] == "ok" or (one["why"] and one["fix"] and one["source"]), (one, kinds)


def test_a_tool_that_may_not_look_does_not_say_that_no_card_is_here(tmp_path, capsys):
    refused = {"nvidia-smi": ("Failed to initialize NVML: Insufficient Permissions\n", 4)}
    section = probe(machine(tmp_path / "m", kinds=refused), capsys)
    assert section["observed"]["gpu_present"] is None and section["observed"]["gpu_usable"] is False


def test_a_card_that_waits_for_a_reset_is_not_counted_as_usable(tmp_path, capsys):
    section = probe(machine(tmp_path / "m", kinds=ONE_NEEDS_RESET), capsys)
    (usable,) = [one for one in section["findings"] if one["code"] == "gpu-usable"]
    assert usable["what"].startswith("1 device") and section["observed"]["gpu_usable"] is True
    assert [gpu.get("needs_reset", False) for gpu in section["observed"]["gpus"]] == [False, True]
    (told,) = [one for one in section["findings"] if one["code"] == "gpu-needs-reset"]
    assert "GPU 1" in told["what"]


def test_a_warning_below_the_table_does_not_cut_it_off(tmp_path, capsys):
    table = PERSISTENCE.replace("MODE", "On ").replace("SHOW", "Off").rstrip()
    text = table + "\nWARNING: infoROM is corrupted at gpu 0000:07:00.0\n"
    codes = {one["code"] for one in probe(machine(tmp_path / "m", kinds={"nvidia-smi": text}), capsys)["findings"]}
    assert "inforom-corrupted" in codes and "tool-output-truncated" not in codes

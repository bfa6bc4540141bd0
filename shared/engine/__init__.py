"""The engine: everything that computes. Only this package and `kernels` import torch.

OpenMP reads its wait policy when torch is first imported. Its default, spinning, lets the idle threads of one worker
take the cores of the others; so it is set here, ahead of every import of torch, unless the environment says otherwise.
The launcher adds `GOMP_SPINCOUNT`, which goes before it, where there are cores for all threads.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

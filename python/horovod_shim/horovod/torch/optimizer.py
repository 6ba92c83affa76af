import sys

import gohvd.torch.optimizer

sys.modules[__name__] = gohvd.torch.optimizer

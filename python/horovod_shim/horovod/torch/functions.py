import sys

import gohvd.torch.functions

sys.modules[__name__] = gohvd.torch.functions

import sys

import gohvd.torch.compression

sys.modules[__name__] = gohvd.torch.compression

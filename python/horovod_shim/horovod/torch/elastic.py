import sys

import gohvd.torch.elastic

sys.modules[__name__] = gohvd.torch.elastic

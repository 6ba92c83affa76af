import sys

import gohvd.ray.elastic

sys.modules[__name__] = gohvd.ray
sys.modules[__name__ + ".elastic"] = gohvd.ray.elastic

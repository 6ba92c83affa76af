package half_test

import (
	"fmt"

	"github.com/gohvd/gohvd/half"
)

// A float16 has 11 significant bits, so above 2048 it cannot represent every integer. A bfloat16 has only 8.
func Example() {
	for _, f := range []float32{0.1, 2049, 1e6} {
		fmt.Println(f, half.Float16FromFloat32(f), half.BFloat16FromFloat32(f))
	}
	// Output:
	// 0.1 0.099975586 0.100097656
	// 2049 2048 2048
	// 1e+06 +Inf 999424
}

package optdigits

import "testing"

// TestData checks the number of images and the range of their values, and that the seed determines their
// order.
func TestData(t *testing.T) {
	train, test, err := Load(1)
	if err != nil {
		t.Fatal(err)
	}
	if len(train) != 1437 || len(test) != 360 {
		t.Errorf("%d and %d images, want 1437 and 360", len(train), len(test))
	}
	var seen [Classes]int
	for _, img := range append(train, test...) {
		seen[img.Digit]++
		for _, p := range img.Pixels {
			if p < 0 || p > 1 {
				t.Fatalf("pixel %v", p)
			}
		}
	}
	for digit, n := range seen {
		if n < 170 {
			t.Errorf("%d images of digit %d", n, digit)
		}
	}
	again, _, _ := Load(1)
	other, _, _ := Load(2)
	if again[0] != train[0] || other[0] == train[0] {
		t.Error("the seed does not determine the order")
	}
}

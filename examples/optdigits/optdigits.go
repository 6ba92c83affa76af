// Package optdigits has the pictures of handwritten digits with which the examples train.
//
// The file optdigits.csv.gz is the test partition of Optical Recognition of Handwritten Digits (E. Alpaydin,
// C. Kaynak, 1998; UCI Machine Learning Repository, doi 10.24432/C50P49). Its licence is CC BY 4.0. It has
// 1797 rows. Each row has the 64 pixels of an 8x8 image, as integers from 0 to 16, followed by the digit,
// from 0 to 9. The file is an unchanged copy from Debian's package python3-sklearn 1.2.1.
package optdigits

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/csv"
	"fmt"
	"math/rand/v2"
	"strconv"
)

//go:embed optdigits.csv.gz
var file []byte

// Pixels is the number of pixels of an image, and Classes the number of digits.
const (
	Pixels  = 64
	Classes = 10
)

// Image is a picture of a handwritten digit. It holds the pixels, scaled to the range from 0 to 1, and the
// digit.
type Image struct {
	Pixels [Pixels]float32
	Digit  int
}

// Load returns four fifths of the images for training and the rest for testing. The seed determines the split
// and the order, so they are the same in every process.
func Load(seed uint64) (train, test []Image, err error) {
	z, err := gzip.NewReader(bytes.NewReader(file))
	if err != nil {
		return nil, nil, fmt.Errorf("optdigits: read the data: %w", err)
	}
	rows, err := csv.NewReader(z).ReadAll()
	if err != nil {
		return nil, nil, fmt.Errorf("optdigits: read the data: %w", err)
	}
	images := make([]Image, len(rows))
	for i, row := range rows {
		if len(row) != Pixels+1 {
			return nil, nil, fmt.Errorf("optdigits: data row %d: got %d fields, want %d", i+1, len(row),
				Pixels+1)
		}
		for j, field := range row {
			v, err := strconv.Atoi(field)
			if err != nil {
				return nil, nil, fmt.Errorf("optdigits: data row %d: %w", i+1, err)
			}
			if j < Pixels {
				images[i].Pixels[j] = float32(v) / 16
			} else {
				images[i].Digit = v
			}
		}
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	rng.Shuffle(len(images), func(i, j int) { images[i], images[j] = images[j], images[i] })
	n := len(images) * 4 / 5
	return images[:n], images[n:], nil
}

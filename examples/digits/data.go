package main

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
var optdigits []byte

const (
	pixels  = 64
	classes = 10
)

// image is a picture of a handwritten digit. It holds the pixels, scaled to the range from 0 to 1, and the
// digit.
type image struct {
	pixels [pixels]float32
	digit  int
}

// loadImages returns four fifths of the images for training and the rest for testing. The seed determines the
// split and the order, so they are the same at every rank.
func loadImages(seed uint64) (train, test []image, err error) {
	z, err := gzip.NewReader(bytes.NewReader(optdigits))
	if err != nil {
		return nil, nil, fmt.Errorf("digits: read the data: %w", err)
	}
	rows, err := csv.NewReader(z).ReadAll()
	if err != nil {
		return nil, nil, fmt.Errorf("digits: read the data: %w", err)
	}
	images := make([]image, len(rows))
	for i, row := range rows {
		if len(row) != pixels+1 {
			return nil, nil, fmt.Errorf("digits: data row %d: got %d fields, want %d", i+1, len(row),
				pixels+1)
		}
		for j, field := range row {
			v, err := strconv.Atoi(field)
			if err != nil {
				return nil, nil, fmt.Errorf("digits: data row %d: %w", i+1, err)
			}
			if j < pixels {
				images[i].pixels[j] = float32(v) / 16
			} else {
				images[i].digit = v
			}
		}
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	rng.Shuffle(len(images), func(i, j int) { images[i], images[j] = images[j], images[i] })
	n := len(images) * 4 / 5
	return images[:n], images[n:], nil
}

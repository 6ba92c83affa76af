package autotune_test

import (
	"fmt"
	"math"

	"github.com/gohvd/gohvd/autotune"
)

// A program is fastest with a fusion threshold of 4 MiB. The user has set the cycle time.
func ExampleTuner() {
	space := autotune.Space{autotune.FusionThreshold(128 << 20), autotune.CycleTime(1).Fix()}
	tuner, err := autotune.New(space, autotune.DefaultOptions())
	if err != nil {
		panic(err)
	}
	for !tuner.Done() {
		threshold, _ := tuner.Next().Number(autotune.FusionThresholdName)
		doublings := math.Log2((threshold+1)/(4<<20)) / 10
		micros := 1000 * (1 + doublings*doublings)
		tuner.Step(1<<20, micros) // a step of training
	}
	threshold, _ := tuner.Best().Number(autotune.FusionThresholdName)
	fmt.Println("within a factor of two:", threshold >= 2<<20 && threshold <= 8<<20)
	cycle, _ := tuner.Best().Number(autotune.CycleTimeName)
	fmt.Println("cycle time in ms:", cycle)
	// Output:
	// within a factor of two: true
	// cycle time in ms: 1
}

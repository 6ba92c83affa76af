package tuning

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/gohvd/gohvd/autotune"
	"github.com/gohvd/gohvd/internal/message"
)

// A step ends when one of its tensors is granted again, whichever it is.
func TestMeter(t *testing.T) {
	var m meter
	var steps []string
	for i, name := range []string{"warm", "a", "b", "c", "b", "a", "c", "a", "a"} {
		if total, took, ended := m.add(name, 1<<i, time.Duration(i)); ended {
			steps = append(steps, fmt.Sprint(name, " ", total, " ", int(took)))
		}
	}
	if want := []string{"b 15 4", "a 112 3", "a 128 1"}; !reflect.DeepEqual(steps, want) {
		t.Errorf("got steps %q, want %q", steps, want)
	}
}

// If each tensor has a new name, there are no steps, and the meter does not use more and more memory.
func TestMeterWithoutRepetition(t *testing.T) {
	var m meter
	for i := range 3 * maxNames {
		if _, _, ended := m.add(fmt.Sprint(i), 1, 0); ended || len(m.names) > maxNames {
			t.Fatalf("after %d tensors a step ended: %v, and the meter has %d names, want at most %d", i, ended,
				len(m.names), maxNames)
		}
	}
}

// Each parameter has a name and an effect of its own: every field of message.Tuning survives the way into a
// point and back.
func TestEveryParameterHasAnEffect(t *testing.T) {
	cfg := &Config{Given: func(string) bool { return false }, OverTCP: true}
	want := message.Tuning{FusionThresholdBytes: 3 << 20, CycleTime: 1234567, SegmentBytes: 1 << 20,
		CacheOff: true, OneLevelAllreduce: true, OneLevelAllgather: true, Allreduce: message.HalvingDoubling}
	for i := range reflect.ValueOf(want).NumField() {
		if reflect.ValueOf(want).Field(i).IsZero() {
			t.Errorf("the test has no value for %s", reflect.TypeOf(want).Field(i).Name)
		}
	}
	if got := cfg.valuesOf(cfg.space(want).Default()); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if _, err := autotune.New(cfg.space(want), autotune.DefaultOptions()); err != nil {
		t.Error(err)
	}
}

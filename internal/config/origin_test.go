package config_test

import (
	"maps"
	"testing"
)

// The chosen settings, which timelines show, have no secrets and no place in the job.
func TestChosen(t *testing.T) {
	c, err := load(map[string]string{"HVD_SECRET": "abcdefghijklmnopqrstuvwxyz012345", "HVD_RANK": "1",
		"HVD_SIZE": "2", "HVD_UNIQUE_ID": "x", "HOROVOD_CACHE_CAPACITY": "77"})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"HOROVOD_CACHE_CAPACITY": "77", "HVD_SIZE": "2"}
	if got := c.Chosen(); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

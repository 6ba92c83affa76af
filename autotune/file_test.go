package autotune

import (
	"errors"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/gohvd/gohvd/internal/testnet"
)

// Load reads what Save has written.
func TestSaveAndLoad(t *testing.T) {
	s := logSpace()
	p := s.Default()
	p.values = []float64{94208, 0.14, 1 << 20, 3, 0, 0}
	var b strings.Builder
	if err := Save(&b, p, 12.5); err != nil {
		t.Fatal(err)
	}
	want := testnet.ReadFile(t, "testdata/settings.json")
	if b.String() != string(want) {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	got, score, err := Load(strings.NewReader(b.String()), s)
	if err != nil || !got.Equal(p) || score != 12.5 {
		t.Errorf("got %v, %v, %v; want %v", got, score, err, p)
	}
	s[0] = FusionThreshold(1 << 20).Fix()
	if got, _, err = Load(strings.NewReader(b.String()), s); err != nil || got.values[0] != 1<<20 {
		t.Errorf("a fixed parameter is %v, %v; want it unchanged", got, err)
	}
	got, _, err = Load(strings.NewReader(`{"version": 1, "settings": {}}`), s)
	if err != nil || !got.Equal(s.Default()) {
		t.Errorf("got %v, %v; want the defaults", got, err)
	}
	if err := Save(failing{}, p, 1); !errors.Is(err, errFull) {
		t.Errorf("got error %v, want that of the writer", err)
	}
	if _, _, err := Load(iotest.ErrReader(errFull), s); !errors.Is(err, errFull) {
		t.Errorf("got error %v, want that of the reader", err)
	}
}

// A file that is not valid is an error that says what is wrong.
func TestLoadErrors(t *testing.T) {
	for text, want := range map[string]string{
		``:                             "EOF",
		`{}`:                           "version is 0, want 1",
		`{"version": 2, "more": 1}`:    "version is 2, want 1",
		`{"version": 1, "more": 1}`:    "unknown object member name",
		`{"version": 1} {}`:            "invalid character",
		`{"version": 1, "score": -1}`:  "score is -1, want at least 0",
		`{"version": 1, "version": 1}`: "duplicate object member name",
		`S{"cycle_ms": 1, "b": 2}`:     `unknown settings "b", "cycle_ms": want only fusion_threshold_bytes,`,
		`S{"cycle_time_ms": 1, "cycle_time_ms": 1}`: "duplicate object member name",
		`S{"cycle_time_ms": 26}`:                    "cycle_time_ms is 26, want 0 or a number from 0.1 to 25",
		`S{"cycle_time_ms": "1"}`:                   `cycle_time_ms is "1", want 0 or a number from 0.1 to 25`,
		`S{"cycle_time_ms": null}`:                  "cycle_time_ms is null, want 0 or a number",
		`S{"segment_bytes": 100000}`:                "segment_bytes is 100000, want a power of two from 65536 to 8388608",
		`S{"algorithm": "star"}`:                    `algorithm is "star", want one of auto, ring, direct, halving-doubling`,
		`S{"algorithm": 1}`:                         "algorithm is 1, want one of auto",
		`S{"cache_enabled": 1}`:                     "cache_enabled is 1, want true or false",
		strings.Repeat(" ", maxFileBytes+1):         "more than 1048576 bytes",
	} {
		if rest, ok := strings.CutPrefix(text, "S"); ok {
			text = `{"version": 1, "settings": ` + rest + `}`
		}
		_, _, err := Load(strings.NewReader(text), logSpace())
		if err == nil || !strings.HasPrefix(err.Error(), "autotune: load settings: ") ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: got error %v, want %s", text, err, want)
		}
	}
}

// Load does not panic. If it accepts a file, Save writes its settings and Load reads them again.
func FuzzLoad(f *testing.F) {
	text := testnet.ReadFile(f, "testdata/settings.json")
	f.Add(string(text))
	f.Add(`{"version": 1, "settings": {"algorithm": "ring"}}`)
	f.Fuzz(func(t *testing.T, text string) {
		p, score, err := Load(strings.NewReader(text), logSpace())
		if err != nil {
			return
		}
		var b strings.Builder
		if err := Save(&b, p, score); err != nil {
			t.Fatal(err)
		}
		q, again, err := Load(strings.NewReader(b.String()), logSpace())
		if err != nil || !q.Equal(p) || again != score {
			t.Errorf("got %v, %v, %v; want %v, %v", q, again, err, p, score)
		}
	})
}

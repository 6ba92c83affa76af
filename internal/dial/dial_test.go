package dial

import (
	"bytes"
	"testing"
)

func FuzzReadGreeting(f *testing.F) {
	f.Add(Greeting("GHVX", 1))
	f.Add(Greeting("GHVY", 1))
	f.Add([]byte("GHVX"))
	f.Add([]byte("GHVA\x01\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, in []byte) {
		version, err := ReadGreeting(bytes.NewReader(in), "GHVX")
		if err == nil && !bytes.HasPrefix(in, Greeting("GHVX", version)) {
			t.Errorf("%x was read as version %d", in, version)
		}
	})
}

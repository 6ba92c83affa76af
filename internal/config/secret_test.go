package config_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestJobSecret checks that the secret comes from HVD_SECRET, or else from the file that HVD_SECRET_FILE
// names. Invalid secrets must be refused, with errors that do not contain the secret.
func TestJobSecret(t *testing.T) {
	write := func(text string) string {
		file := filepath.Join(t.TempDir(), "secret")
		testnet.WriteFile(t, file, text)
		return file
	}
	const same = "sixteen bytes it is"
	file, empty, short := write("  "+same+"\n"), write(""), write("short")
	for _, test := range []struct {
		set  config.Config
		none bool
		want string // part of the expected error, or empty if there must be no error
	}{
		{config.Config{}, true, ""},
		{config.Config{Secret: same}, false, ""},
		{config.Config{SecretFile: file}, false, ""},
		{config.Config{SecretFile: file, TLS: true}, false, ""},
		{config.Config{Secret: same, SecretFile: "/not/looked/at"}, false, ""},
		{config.Config{Secret: "short"}, false, "HVD_SECRET: the secret has 5 bytes"},
		{config.Config{SecretFile: short}, false, "HVD_SECRET_FILE " + short + ": the secret has 5 bytes"},
		{config.Config{SecretFile: empty}, false, "HVD_SECRET_FILE " + empty + " is empty"},
		{config.Config{SecretFile: file + ".not"}, false, "HVD_SECRET_FILE: open"},
	} {
		s, err := test.set.JobSecret()
		if test.want != "" {
			if err == nil || !strings.Contains(err.Error(), test.want) ||
				strings.Contains(err.Error(), `"short"`) {
				t.Errorf("%+v: got %v, want %q", test.set, err, test.want)
			}
			continue
		}
		if err != nil || s.IsZero() != test.none || s.IsEncrypted() {
			t.Errorf("%+v: got %v, %v", test.set, s, err)
		}
	}
	a, errA := (&config.Config{Secret: same}).JobSecret()
	b, errB := (&config.Config{SecretFile: file}).JobSecret()
	if err := errors.Join(errA, errB); err != nil || !a.Equal(b) {
		t.Errorf("the same text as a value and in a file gave different secrets: %v", err)
	}
}

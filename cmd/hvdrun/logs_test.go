package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"go.uber.org/zap/zapcore"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestLogFormat checks which log format hvdrun sets for the ranks. It must set the console format if the
// format is auto and hvdrun's standard error is a terminal.
func TestLogFormat(t *testing.T) {
	_, slave := testnet.Terminal(t)
	for _, test := range []struct {
		stderr io.Writer
		format string
		want   string
	}{
		{slave, "auto", "HVD_LOG_FORMAT=console"}, {slave, "json", ""}, {slave, "console", ""},
		{new(bytes.Buffer), "auto", ""}, {new(bytes.Buffer), "console", ""},
	} {
		r := &runner{stderr: test.stderr}
		if got := strings.Join(r.logFormat(&config.Config{LogFormat: test.format}), " "); got != test.want {
			t.Errorf("%s on %T: got %q, want %q", test.format, test.stderr, got, test.want)
		}
	}
}

// TestLogFormatReachesTheRanks checks that the log format that hvdrun chooses is in the environment of the
// ranks.
func TestLogFormatReachesTheRanks(t *testing.T) {
	master, slave := testnet.Terminal(t)
	cmd := hvdrun(t, "-np", "1", "sh", "-c", "echo format=$HVD_LOG_FORMAT")
	cmd.Stderr = slave
	out, err := cmd.Output()
	if err != nil || !strings.Contains(string(out), "format=console") {
		t.Errorf("got %q, %v", out, err)
	}
	if err := slave.Close(); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, master) // ends with EIO when no process has the other end of the terminal open
	stdout, _, _ := output(t, "-np", "1", "sh", "-c", "echo format=$HVD_LOG_FORMAT")
	if !strings.Contains(stdout, "format=\n") {
		t.Errorf("in a pipe: got %q", stdout)
	}
}

// TestLogger checks that hvdrun's own log obeys the settings for logs, and that with --verbose it includes
// messages of level info.
func TestLogger(t *testing.T) {
	for _, test := range []struct {
		env     []string
		verbose bool
		want    zapcore.Level
		json    bool
	}{
		{nil, false, zapcore.WarnLevel, true},
		{nil, true, zapcore.InfoLevel, true},
		{[]string{"HOROVOD_LOG_LEVEL=debug"}, true, zapcore.DebugLevel, true},
		{[]string{"HOROVOD_LOG_LEVEL=error", "HVD_LOG_FORMAT=console"}, false, zapcore.ErrorLevel, false},
		{[]string{"HOROVOD_LOG_LEVEL=nonsense"}, false, zapcore.WarnLevel, true},
	} {
		var out bytes.Buffer
		r := &runner{env: test.env, verbose: test.verbose, stderr: &out}
		log := r.logger()
		if got := log.Level(); got != test.want {
			t.Errorf("%v, verbose %v: got level %v, want %v", test.env, test.verbose, got, test.want)
		}
		log.Error("e")
		if got := strings.HasPrefix(out.String(), "{"); got != test.json {
			t.Errorf("%v: got %q", test.env, out.String())
		}
	}
}

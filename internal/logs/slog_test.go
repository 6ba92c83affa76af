package logs_test

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/internal/logs"
)

func TestFromSlog(t *testing.T) {
	var out bytes.Buffer
	options := &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}
	log := logs.FromSlog(slog.New(slog.NewTextHandler(&out, options))).With(zap.Int("rank", 2))
	log.Debug("too low")
	log.Info("joined", zap.Duration("after", 3*time.Second), zap.Stringer("level", zapcore.WarnLevel))
	log.Error("failed", zap.Error(errors.New("no route")))
	want := "level=INFO msg=joined rank=2 after=3s level=warn\nlevel=ERROR msg=failed rank=2 error=\"no route\"\n"
	if got := out.String(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestToSlog(t *testing.T) {
	core, entries := observer.New(zapcore.WarnLevel)
	log := zap.New(core)
	if logs.FromSlog(logs.ToSlog(log)) != log {
		t.Error("FromSlog has not returned the logger that was passed to ToSlog")
	}
	s := logs.ToSlog(log).With("rank", 2).WithGroup("peer")
	s.Info("too low")
	s.Warn("slow", "id", 9)
	s.Log(t.Context(), slog.LevelError+100, "failed")
	all := entries.All()
	if len(all) != 2 || all[0].Message != "slow" || all[0].Level != zapcore.WarnLevel ||
		all[1].Level != zapcore.ErrorLevel {
		t.Fatalf("got %v, want a warning and an error", all)
	}
	fields := all[0].ContextMap()
	peer, _ := fields["peer"].(map[string]any)
	if fields["rank"] != int64(2) || peer["id"] != int64(9) {
		t.Errorf("got the fields %v", fields)
	}
}

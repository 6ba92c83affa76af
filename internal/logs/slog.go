package logs

import (
	"context"
	"log/slog"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// levelStep is the distance in slog between levels that are neighbours in zap, such as info and warning.
const levelStep = 4

// FromSlog returns a logger that passes its entries to l. If ToSlog returned l, FromSlog returns the original
// logger.
func FromSlog(l *slog.Logger) *zap.Logger {
	if h, ok := l.Handler().(handler); ok {
		return h.log
	}
	return zap.New(slogCore{l.Handler()})
}

// ToSlog returns a logger that passes its records to log.
func ToSlog(log *zap.Logger) *slog.Logger { return slog.New(handler{log}) }

// slogCore is a zapcore.Core that passes entries to a handler of slog.
type slogCore struct{ to slog.Handler }

// Enabled implements zapcore.Core.
func (c slogCore) Enabled(l zapcore.Level) bool {
	return c.to.Enabled(context.Background(), toSlogLevel(l))
}

// With implements zapcore.Core.
func (c slogCore) With(fields []zapcore.Field) zapcore.Core {
	return slogCore{c.to.WithAttrs(attrsOf(fields))}
}

// Check implements zapcore.Core.
func (c slogCore) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return checked.AddCore(e, c)
	}
	return checked
}

// Write implements zapcore.Core.
func (c slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	r := slog.NewRecord(e.Time, toSlogLevel(e.Level), e.Message, 0)
	r.AddAttrs(attrsOf(fields)...)
	return c.to.Handle(context.Background(), r)
}

// Sync implements zapcore.Core. A handler of slog has no buffer that could be written.
func (c slogCore) Sync() error { return nil }

// handler is a slog.Handler that passes records to a logger of zap.
type handler struct{ log *zap.Logger }

// Enabled implements slog.Handler.
func (h handler) Enabled(_ context.Context, l slog.Level) bool {
	return h.log.Core().Enabled(toZapLevel(l))
}

// Handle implements slog.Handler.
func (h handler) Handle(_ context.Context, r slog.Record) error {
	var fields []zapcore.Field
	r.Attrs(func(a slog.Attr) bool {
		fields = append(fields, zap.Any(a.Key, a.Value.Resolve().Any()))
		return true
	})
	if entry := h.log.Check(toZapLevel(r.Level), r.Message); entry != nil {
		entry.Write(fields...)
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	var fields []zapcore.Field
	for _, a := range attrs {
		fields = append(fields, zap.Any(a.Key, a.Value.Resolve().Any()))
	}
	return handler{h.log.With(fields...)}
}

// WithGroup implements slog.Handler.
func (h handler) WithGroup(name string) slog.Handler { return handler{h.log.With(zap.Namespace(name))} }

func toSlogLevel(l zapcore.Level) slog.Level { return slog.Level(levelStep * int(l)) }

// toZapLevel returns the level of zap for a level of slog, at most that of an error: with higher levels, zap
// ends the program.
func toZapLevel(l slog.Level) zapcore.Level {
	for z := Trace; z < zapcore.ErrorLevel; z++ {
		if l < toSlogLevel(z+1) {
			return z
		}
	}
	return zapcore.ErrorLevel
}

// attrsOf returns fields as attributes. Errors, durations and times keep their types.
func attrsOf(fields []zapcore.Field) (attrs []slog.Attr) {
	for _, f := range fields {
		if f.Type == zapcore.ErrorType {
			attrs = append(attrs, slog.Any(f.Key, f.Interface))
			continue
		}
		m := zapcore.NewMapObjectEncoder()
		f.AddTo(m)
		for key, v := range m.Fields {
			attrs = append(attrs, slog.Any(key, v))
		}
	}
	return attrs
}

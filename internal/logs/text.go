package logs

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// maxTextBytes bounds a message, and a text in a field. A name of a tensor may have 4096 bytes.
const maxTextBytes = 1 << 10

// plain returns a message cut to its bound, in which what does not print is escaped as by strconv.Quote: the end of a line, what a
// terminal obeys, and what is no UTF-8.
func plain(text string) string { return escape(cut(text), unprintable) }

func unprintable(r rune) bool { return r == utf8.RuneError || !strconv.IsPrint(r) }

// unquoted returns what does not print and what an encoder of fields, which quotes them as JSON, leaves as it is.
func unquoted(r rune) bool { return r >= 0x7f && unprintable(r) }

func escape(text string, which func(rune) bool) string {
	if !strings.ContainsFunc(text, which) {
		return text
	}
	var b strings.Builder
	for rest := text; rest != ""; {
		r, n := utf8.DecodeRuneInString(rest)
		if which(r) {
			quoted := strconv.Quote(rest[:n])
			b.WriteString(quoted[1 : len(quoted)-1])
		} else {
			b.WriteString(rest[:n])
		}
		rest = rest[n:]
	}
	return b.String()
}

// cut returns the beginning of a text that is too long, which says so.
func cut(text string) string {
	if len(text) <= maxTextBytes {
		return text
	}
	n := maxTextBytes
	for n > maxTextBytes-utf8.UTFMax && !utf8.RuneStart(text[n]) {
		n--
	}
	return fmt.Sprintf("%s... (%d bytes)", text[:n], len(text))
}

// bounded returns fields with their texts shortened and fit to be quoted. The slice is the caller's, and not changed.
func bounded(fields []zapcore.Field, shorten func(string) string) []zapcore.Field {
	var changed []zapcore.Field
	for i, f := range fields {
		text, ok := textOf(f)
		if !ok {
			continue
		}
		if p := escape(shorten(text), unquoted); p != text {
			if changed == nil {
				changed = append(changed, fields...)
			}
			changed[i] = zap.String(f.Key, p)
		}
	}
	if changed != nil {
		return changed
	}
	return fields
}

// textOf returns the text of a field, if it is one.
func textOf(f zapcore.Field) (text string, ok bool) {
	switch f.Type {
	case zapcore.StringType:
		return f.String, true
	case zapcore.ErrorType:
		err, ok := f.Interface.(error)
		if !ok {
			return "", false
		}
		return err.Error(), true
	}
	return "", false
}

package logs

import (
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// maxTextBytes is the maximum length of a message and of a text in a field. Longer texts are shortened. They
// can occur because, for example, the name of a tensor may have 4096 bytes.
const maxTextBytes = 1 << 10

// Plain makes a text from another process or from a file safe for one line of a log or of a report on a
// terminal. It shortens the text to 1024 bytes, and escapes it as Escape does.
func Plain(text string) string { return Escape(cut(text)) }

// Escape escapes unprintable characters of a text as strconv.Quote does. These are line ends, tabs, control
// characters of terminals, and invalid UTF-8. It is for a text whose length is limited already.
func Escape(text string) string { return escape(text, unprintable) }

func unprintable(r rune) bool { return r == utf8.RuneError || !strconv.IsPrint(r) }

// unquoted reports whether r is an unprintable character that zap's encoders do not escape. They escape other
// characters, because they quote the texts of fields as JSON.
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

// cut shortens text to maxTextBytes and appends its original length. If text is not longer than that, cut
// returns it unchanged.
func cut(text string) string {
	if len(text) <= maxTextBytes {
		return text
	}
	return fmt.Sprintf("%s... (%d bytes)", prefix(text, maxTextBytes), len(text))
}

// prefix returns the first n bytes of a text, or up to three less, so that it does not end within a
// character.
func prefix(text string, n int) string {
	least := n - utf8.UTFMax
	for n > least && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}

// Clip shortens a name that is longer than the given number of bytes to less than that. It appends a
// checksum, so that names with the same beginning stay different.
func Clip(name string, most int) string {
	if len(name) <= most {
		return name
	}
	return fmt.Sprintf("%s…%08x", prefix(name, most-12), crc32.ChecksumIEEE([]byte(name)))
}

// bounded returns a copy of fields with changed texts. Each text is shortened by calling shorten, and
// unprintable characters that the encoder does not escape are escaped. If no text changes, bounded returns
// fields itself. It never modifies that slice.
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

// textOf returns the text of a field that holds a string or an error. For any other field, ok is false.
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

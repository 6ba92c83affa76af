// Package inquiry asks all ranks of a job something through the job's store, and lets a rank volunteer what nobody has asked.
//
// Who asks puts a numbered question on a list in the store; every rank watches that list, and pushes what it has to say to the
// question's queue, which the asker empties. So
//
//  1. a rank has one waiting call, whatever is asked, and answers the questions of several askers one after the other;
//  2. askers do not wait for each other, and each gets only the answers to its own question;
//  3. a rank's first answer counts. An answer that nobody waits for any more is removed by its rank; a question that an asker left
//     behind when it died is pushed off the list by later ones;
//  4. a rank that comes back in a new epoch does not answer again what it has answered before.
//
// Who is in the job has its secret and is believed: a rank could answer in the name of another.
package inquiry

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/gohvd/gohvd/store"
)

// Questions that ranks of this version understand.
const (
	// Dump asks for what the flight recorder has.
	Dump = "dump"
	// Metrics asks for the counters.
	Metrics = "metrics"
)

// What ranks volunteer.
const (
	// Stall is a text of rank 0: tensors have waited for longer than the warning time.
	Stall = "stall"
	// Failure is the dump of a rank whose job has failed, as an answer to Dump is.
	Failure = "failure"
)

const (
	// MaxBodyBytes bounds an answer or a report.
	MaxBodyBytes = store.MaxValueBytes - maxHeadBytes
	// MaxWhatBytes bounds the name of a question or a report.
	MaxWhatBytes = 128

	maxHeadBytes = 1 + 2*binary.MaxVarintLen64 + MaxWhatBytes
	// maxOpen bounds the questions on the list.
	maxOpen = 64
	// maxReports bounds the reports that nobody has taken yet: some of each rank of the largest job.
	maxReports = 16 << 10
)

// tidying is how long an asker tidies up at most.
const tidying = time.Second

// Keys in the store.
const (
	keyLast     = "inquiry/last"      // the number of the last question
	keyOpen     = "inquiry/open"      // the list of questions
	keyAnswers  = "inquiry/answers/"  // and a question's number: the queue of its answers
	keyAnswered = "inquiry/answered/" // and a rank: the questions of the list that it has answered
	keyWatched  = "inquiry/watched"   // is there if somebody takes reports
	keyReports  = "inquiry/reports"   // the queue of reports
)

var (
	// ErrNobody is the error of Report if nobody watches, as in a job that hvdrun has not started.
	ErrNobody = errors.New("nobody takes reports of this job")
	// ErrMalformed says that the store holds something else than what this package puts there.
	ErrMalformed = errors.New("malformed")
)

// question is one on the list.
type question struct {
	ID   int64  `json:"id"`
	What string `json:"what"`
}

// Ask asks ranks 0 to ranks-1 and waits until all have answered, or ctx ends. missing are those that have not, or had nothing to
// say to this question, in order. The error is the store's, and not that ctx has ended; what was answered until then is returned with it.
//
// Memory is that of the answers, at most MaxBodyBytes each. In the store it costs a list entry, and the answers until they are taken.
func Ask(ctx context.Context, kv store.Store, what string, ranks int) (answers map[int][]byte, missing []int, err error) {
	answers, silent := make(map[int][]byte), make(map[int]bool)
	for r := range ranks {
		silent[r] = true
	}
	if len(silent) == 0 {
		return answers, nil, nil
	}
	err = ask(ctx, kv, what, func(rank int, body []byte, has bool) (more bool) {
		if silent[rank] {
			delete(silent, rank)
			if has {
				answers[rank] = body
			}
		}
		return len(silent) > 0
	})
	for r := range ranks {
		if _, ok := answers[r]; !ok {
			missing = append(missing, r)
		}
	}
	if err != nil {
		return answers, missing, fmt.Errorf("inquiry: ask ranks for %.*q: %w", MaxWhatBytes, what, err)
	}
	return answers, missing, nil
}

// ask hands on the answers until no more are wanted, or ctx ends.
func ask(ctx context.Context, kv store.Store, what string, hear func(rank int, body []byte, has bool) (more bool)) (err error) {
	if err := checkWhat(what); err != nil {
		return err
	}
	id, err := kv.Add(ctx, keyLast, 1)
	if err != nil {
		return unlessOver(ctx, err)
	}
	defer func() {
		err = unlessOver(ctx, err)
		// The question goes first: a rank that pushes an answer after the queue was emptied sees that, and takes it back.
		tidy, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidying)
		defer cancel()
		err = errors.Join(err, tidyUp(tidy, kv, id))
	}()
	var pushedOff []question
	err = change(ctx, kv, func(open []question) []question {
		open = append(open, question{id, what})
		over := max(len(open)-maxOpen, 0)
		pushedOff = open[:over]
		return open[over:]
	})
	if err != nil {
		return err
	}
	for _, q := range pushedOff {
		if err := drain(ctx, kv, q.ID); err != nil {
			return err
		}
	}
	for {
		text, err := kv.Pop(ctx, answersTo(id))
		if err != nil {
			return err
		}
		// What is malformed is nobody's answer.
		if rank, body, has, err := decodeAnswer(text); err == nil && !hear(rank, body, has) {
			return nil
		}
	}
}

// unlessOver is err, or nil if ctx has ended, for then the call was only cut short.
func unlessOver(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// tidyUp removes a question and its answers.
func tidyUp(ctx context.Context, kv store.Store, id int64) error {
	err := change(ctx, kv, func(open []question) []question {
		return slices.DeleteFunc(open, func(q question) bool { return q.ID == id })
	})
	return errors.Join(err, drain(ctx, kv, id))
}

// change replaces the list of questions.
func change(ctx context.Context, kv store.Store, to func([]question) []question) error {
	actual, err := peek(ctx, kv, keyOpen)
	for {
		if err != nil {
			return err
		}
		open, _ := decodeOpen(actual) // what is no list is replaced
		text, err := json.Marshal(to(open))
		if err != nil {
			return err
		}
		expected := actual
		var swapped bool
		if actual, swapped, err = kv.CompareAndSet(ctx, keyOpen, expected, text); err != nil || swapped {
			return err
		}
	}
}

// drain empties a queue of answers.
func drain(ctx context.Context, kv store.Store, id int64) error {
	for {
		if _, ok, err := kv.TryPop(ctx, answersTo(id)); !ok || err != nil {
			return err
		}
	}
}

func answersTo(id int64) string { return keyAnswers + strconv.FormatInt(id, 10) }

// peek is Get without the wait: nil for a key without a value.
func peek(ctx context.Context, kv store.Store, key string) ([]byte, error) {
	never := []byte{0} // is no value of ours, so that nothing changes
	actual, _, err := kv.CompareAndSet(ctx, key, never, never)
	return actual, err
}

// Answer answers for a rank until ctx ends, which is no error, or the store fails, as when the launcher is gone. handle is called
// by this goroutine, once for each question; nil says that the rank has nothing to say to it, as does more than MaxBodyBytes.
//
// It costs a waiting call on the store, and four short ones per question.
func Answer(ctx context.Context, kv store.Store, rank int, handle func(what string) []byte) error {
	if err := unlessOver(ctx, answer(ctx, kv, rank, handle)); err != nil {
		return fmt.Errorf("inquiry: rank %d: answer: %w", rank, err)
	}
	return nil
}

func answer(ctx context.Context, kv store.Store, rank int, handle func(what string) []byte) error {
	key := keyAnswered + strconv.Itoa(rank)
	text, err := peek(ctx, kv, key)
	if err != nil {
		return err
	}
	var answered []int64
	if text != nil && json.Unmarshal(text, &answered) != nil {
		answered = nil
	}
	var list []byte
	for {
		if list, err = kv.Watch(ctx, keyOpen, list); err != nil {
			return err
		}
		open, err := decodeOpen(list)
		if err != nil {
			continue // an asker will replace it
		}
		answered = slices.DeleteFunc(answered, func(id int64) bool { return !listed(open, id) })
		for _, q := range open {
			if slices.Contains(answered, q.ID) {
				continue
			}
			answered = append(answered, q.ID)
			if text, err = json.Marshal(answered); err != nil {
				return err
			}
			// If the store is full, the rank might answer again when it comes back; that is all.
			if err := kv.Set(ctx, key, text); err != nil && !errors.Is(err, store.ErrLimit) {
				return err
			}
			if err := reply(ctx, kv, rank, q.ID, handle(q.What)); err != nil {
				return err
			}
		}
	}
}

// reply pushes an answer.
func reply(ctx context.Context, kv store.Store, rank int, id int64, body []byte) error {
	err := kv.Push(ctx, answersTo(id), encodeAnswer(rank, body))
	if errors.Is(err, store.ErrLimit) {
		// The store is full of answers. The asker will see this one missing, and the next question may find room.
		err = kv.Push(ctx, answersTo(id), encodeAnswer(rank, nil))
	}
	if errors.Is(err, store.ErrLimit) {
		return nil
	}
	if err != nil {
		return err
	}
	text, err := peek(ctx, kv, keyOpen)
	if err != nil {
		return err
	}
	if open, err := decodeOpen(text); err == nil && listed(open, id) {
		return nil
	}
	return drain(ctx, kv, id)
}

func listed(open []question, id int64) bool {
	return slices.ContainsFunc(open, func(q question) bool { return q.ID == id })
}

// Report hands something to whoever watches: at most MaxBodyBytes. It does not wait to be heard. If nobody watches, the error is
// ErrNobody.
func Report(ctx context.Context, kv store.Store, rank int, what string, body []byte) error {
	if err := report(ctx, kv, rank, what, body); err != nil {
		return fmt.Errorf("inquiry: rank %d: report %.*q: %w", rank, MaxWhatBytes, what, err)
	}
	return nil
}

// IsWatched reports whether somebody watches, or has watched, for reports.
func IsWatched(ctx context.Context, kv store.Store) (bool, error) {
	watched, err := peek(ctx, kv, keyWatched)
	return watched != nil, err
}

func report(ctx context.Context, kv store.Store, rank int, what string, body []byte) error {
	if err := checkWhat(what); err != nil {
		return err
	}
	if len(body) > MaxBodyBytes {
		return fmt.Errorf("%d bytes, want at most %d", len(body), MaxBodyBytes)
	}
	switch watched, err := IsWatched(ctx, kv); {
	case err != nil:
		return err
	case !watched:
		return ErrNobody
	}
	switch n, err := kv.QueueLen(ctx, keyReports); {
	case err != nil:
		return err
	case n >= maxReports:
		return fmt.Errorf("%d reports were not taken yet, the most that there may be", n)
	}
	return kv.Push(ctx, keyReports, encodeReport(rank, what, body))
}

// Watch hands on reports until ctx ends, which is no error, or the store fails. When ctx ends it still hands on what has come by
// then. A report that is malformed is left out. There may be several watchers; each report goes to one of them.
func Watch(ctx context.Context, kv store.Store, hear func(rank int, what string, body []byte)) error {
	if err := watch(ctx, kv, hear); err != nil {
		return fmt.Errorf("inquiry: watch: %w", err)
	}
	return nil
}

func watch(ctx context.Context, kv store.Store, hear func(rank int, what string, body []byte)) error {
	pass := func(text []byte) {
		if rank, what, body, err := decodeReport(text); err == nil {
			hear(rank, what, body)
		}
	}
	err := kv.Set(ctx, keyWatched, []byte{1})
	for err == nil {
		var text []byte
		if text, err = kv.Pop(ctx, keyReports); err == nil {
			pass(text)
		}
	}
	if err := unlessOver(ctx, err); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidying)
	defer cancel()
	for {
		text, ok, err := kv.TryPop(ctx, keyReports)
		if !ok || err != nil {
			return err
		}
		pass(text)
	}
}

func checkWhat(what string) error {
	if len(what) < 1 || len(what) > MaxWhatBytes {
		return fmt.Errorf("name of %d bytes, want 1 to %d", len(what), MaxWhatBytes)
	}
	return nil
}

func decodeOpen(text []byte) ([]question, error) {
	if text == nil {
		return nil, nil
	}
	if most := (maxOpen + 1) * (8*MaxWhatBytes + 64); len(text) > most { // a byte takes 6 at most in JSON
		return nil, fmt.Errorf("%w: list of questions has %d bytes, want at most %d", ErrMalformed, len(text), most)
	}
	var open []question
	if err := json.Unmarshal(text, &open); err != nil {
		return nil, fmt.Errorf("%w: list of questions: %w", ErrMalformed, err)
	}
	if len(open) > maxOpen {
		return nil, fmt.Errorf("%w: list of %d questions, want at most %d", ErrMalformed, len(open), maxOpen)
	}
	return open, nil
}

// An answer is a byte that is 1 if there is a body, the rank as a uvarint, and the body. A report is the rank, the length of
// what, which both are uvarints, what, and the body.

func encodeAnswer(rank int, body []byte) []byte {
	has := body != nil && len(body) <= MaxBodyBytes
	if !has {
		body = nil
	}
	b := make([]byte, 1, maxHeadBytes+len(body))
	if has {
		b[0] = 1
	}
	return append(binary.AppendUvarint(b, uint64(rank)), body...)
}

func decodeAnswer(text []byte) (rank int, body []byte, has bool, err error) {
	if len(text) < 1 || text[0] > 1 {
		return 0, nil, false, fmt.Errorf("%w: answer begins with %.1x, want 0 or 1", ErrMalformed, text)
	}
	rank, body, err = decodeRank(text[1:])
	return rank, body, text[0] == 1, err
}

func encodeReport(rank int, what string, body []byte) []byte {
	b := make([]byte, 0, maxHeadBytes+len(body))
	b = binary.AppendUvarint(b, uint64(rank))
	b = binary.AppendUvarint(b, uint64(len(what)))
	return append(append(b, what...), body...)
}

func decodeReport(text []byte) (rank int, what string, body []byte, err error) {
	rank, text, err = decodeRank(text)
	if err != nil {
		return 0, "", nil, err
	}
	n, size := binary.Uvarint(text)
	if size <= 0 || n > MaxWhatBytes || n > uint64(len(text)-size) {
		return 0, "", nil, fmt.Errorf("%w: report of rank %d without a name", ErrMalformed, rank)
	}
	text = text[size:]
	return rank, string(text[:n]), text[n:], nil
}

func decodeRank(text []byte) (rank int, rest []byte, err error) {
	r, size := binary.Uvarint(text)
	if size <= 0 || r > 1<<31-1 {
		return 0, nil, fmt.Errorf("%w: no rank", ErrMalformed)
	}
	return int(r), text[size:], nil
}

/* What the test programs share. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gohvd.h"

/* last returns the text of the last error. */
static inline const char *last(void) {
	static hvd_error_t error;
	error.size = sizeof error;
	hvd_last_error(&error);
	return error.text;
}

/* ok ends the program if a call has failed. */
#define ok(call)                                                                              \
	do {                                                                                  \
		hvd_status_t status_ = (call);                                                \
		if (status_ != HVD_SUCCESS) {                                                 \
			fprintf(stderr, "%s:%d: %s: status %d: %s\n", __FILE__, __LINE__, #call, (int)status_, last()); \
			exit(1);                                                              \
		}                                                                             \
	} while (0)

/* want ends the program if a condition is not met. */
#define want(condition)                                                           \
	do {                                                                      \
		if (!(condition)) {                                               \
			fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
			exit(1);                                                  \
		}                                                                 \
	} while (0)

/* fails ends the program if a call does not return a status, or if the text of the error does not contain a part. */
#define fails(call, code, part)                                                               \
	do {                                                                                  \
		hvd_status_t status_ = (call);                                                \
		if (status_ != (code) || !strstr(last(), (part))) {                           \
			fprintf(stderr, "%s:%d: %s: status %d, want %d: %s\n", __FILE__, __LINE__, #call, (int)status_, \
			        (int)(code), last());                                         \
			exit(1);                                                              \
		}                                                                             \
	} while (0)

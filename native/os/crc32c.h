/* crc32c.h -- CRC-32C (Castagnoli) of bytes: the checksum of file systems and networks, for those who ask for it. */
#ifndef SHMC_OS_CRC32C_H
#define SHMC_OS_CRC32C_H
#include <stdint.h>

/* crc32c_by_table -- the same without the processor's help; for machines that have none, and tests */
uint32_t crc32c_by_table(const void *data, uint64_t size);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A library with functions whose names begin like the driver's, or are the driver's, and that are not the driver's.
 */
#define EXPORT __attribute__((visibility("default")))

EXPORT int curl_easy_init(void);
EXPORT int cuckoo_insert(void);
EXPORT int cuMemAlloc_v2(void);

EXPORT int curl_easy_init(void)
{
    return 1;
}

EXPORT int cuckoo_insert(void)
{
    return 2;
}

EXPORT int cuMemAlloc_v2(void)
{
    return 3;
}
